"""Sends the trainer's weights to the fleet after every step; on rank 0.

Guarantees: one version is sent at a time, and generators apply it while the next step trains; a fleet that has not taken it gets
the next one instead, and the last one again. A version is published only if Redis has the commit of its step.
Waits for: a generator that takes the weights, and the answers to the version before. Unblocked by: `fleet`, `acks`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from services.protocol.errors import OutOfOrder
from services.runtime.portal import Portal
from services.runtime.service import Service
from services.trainer.checkpoints.recovery import Recovery
from services.trainer.metrics import TrainerMetrics
from services.trainer.rank_commands import RankCommands
from services.trainer.worker import Worker
from services.weights.delivery import Delivery
from services.weights.leader import SyncRounds
from services.weights.outcomes import Alone, SyncReport
from services.weights.sender import SendFailed


class WeightUpdates:
    """Sends versions, and measures what they cost the trainer."""

    def __init__(
        self, service: Service, portal: Portal, fence: int, worker: Worker, commands: RankCommands, recovery: Recovery,
        metrics: TrainerMetrics, tick: Callable[[], None], ending: Callable[[], bool], say: Callable[..., None],
    ) -> None:  # fmt: skip
        """While no generator takes the weights, `ending` is called and says whether the run is ending.

        `tick` is called in every wait; `say` updates the status that the fleet sees.
        """
        self._store, self._call, self._fence = service.store, portal.call, fence
        self._commands, self._recovery, self._sender, self._metrics = commands, recovery, worker.sender, metrics
        self._ending, self._say, self._clock = ending, say, metrics.sync_clock()
        self._rounds = SyncRounds(
            service.config, service.store, service.notifications, portal, fence, self._sender, self._broadcast, tick, self._begins
        )
        self._delivery = Delivery(self._rounds, portal, service.notifications, self._publish, tick)
        self._version = 0  # the weights of this process
        self._delivered: SyncReport | None = None  # the last round that ended
        self.spent_s = 0.0
        """Seconds that updates took the trainer since this was set to 0, at the beginning of a step."""

    def send(self, version: int) -> None:
        """Send the weights of this process once the fleet has those of the version before.

        A fleet that has not taken those gets these instead, and none gets any if the run ends without generators.
        """
        self._version = version
        with self._syncing():
            self._published(self._delivery.finish())
            self._delivery.begin(version, self._ending)

    def finish(self) -> None:
        """Wait until the weights of this process are published."""
        with self._syncing():
            self._published(self._delivery.finish_or_repeat(self._ending))

    def finish_if_delivered(self) -> None:
        """Finish a version that the fleet has taken meanwhile."""
        if self._delivery.pending and self._delivery.done:
            self.finish()

    def catch_up(self) -> None:
        """Send the weights to generators that joined late, unless they are on their way."""
        if not self._delivery.pending:
            self._rounds.catch_up(self._version)

    def close(self) -> None:
        """Abandon what generators are still applying."""
        self._delivery.close()

    def measured(self) -> dict[str, float]:
        """Return how long updates took the trainer in this step, and figures of the last round that ended."""
        metrics = {"time/sync_s": self.spent_s}
        if (report := self._delivered) is None:
            return metrics | {"fleet/generators": 0.0}
        return metrics | {
            "time/transfer_s": report.transfer_s,
            "fleet/generators": float(len(report.members)),
            "sync/attempts": float(report.attempts),
            **{f"sync/{name}": value for name, value in self._sent().items()},
        }

    def _sent(self) -> dict[str, float]:
        """Return the cost of the last version if it could be a delta, and report it to the fleet."""
        sent = self._sender.sent
        self._say(weights=sent)
        return sent

    @contextlib.contextmanager
    def _syncing(self) -> Iterator[None]:
        self._say(phase="syncing", version=self._version)
        began = time.monotonic()
        try:
            yield
        except Alone:
            self._delivered = None
        finally:
            self._say(paused="")
            self.spent_s += time.monotonic() - began

    def _published(self, report: SyncReport | None) -> None:
        if report is not None:
            self._delivered = report
            self._recovery.published(report.version)

    def _publish(self, report: SyncReport) -> None:
        """Publish, unless Redis has lost the commit of a step: the main thread repeats both, if it still can."""
        with contextlib.suppress(OutOfOrder):
            self._call(self._store.steps.publish(self._fence, report.version))

    def _broadcast(self) -> None:
        try:
            self._commands.lead("send", self._version)
        except SendFailed:
            self._commands.keep_waiting()  # the other ranks have finished gathering and wait for the next command
            raise

    def _begins(self, phase: str) -> None:
        self._clock.enter(phase)
        if phase == "failed":
            self._metrics.sync_failures.inc()
