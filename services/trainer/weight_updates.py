"""Sends the trainer's weights to the fleet after every step; on rank 0.

Guarantees: one version is sent at a time, and generators apply it while the next step trains; a fleet that has not taken it gets
the next one instead, and the last one again. A version is published only if Redis has the commit of its step.
Waits for: a generator that takes the weights, and the answers to the version before. Unblocked by: `fleet`, `acks`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from services.runtime.portal import Portal
from services.runtime.service import Service
from services.trainer.metrics import TrainerMetrics
from services.trainer.recovery import Recovery
from services.weights.rounds.delivery import Delivery
from services.weights.rounds.leader import Alone, SyncReport, SyncRounds
from services.weights.transport import SendFailed


class WeightUpdates:
    """Sends versions, and measures what they cost the trainer."""

    def __init__(
        self,
        service: Service,
        portal: Portal,
        recovery: Recovery,
        metrics: TrainerMetrics,
        tick: Callable[[], None],
        ending: Callable[[], bool],
        say: Callable[..., None],
    ) -> None:
        """While no generator takes the weights, `ending` is called and says whether the run is ending.

        `tick` is called in every wait; `say` updates the status that the fleet sees.
        """
        self._recovery, self._commands, self._sender = recovery, recovery.commands, recovery.worker.sender
        self._ending, self._say = ending, say
        self._rounds = SyncRounds(service, portal, recovery.fence, self._sender, self._send_on_all, tick, metrics)
        self._delivery = Delivery(self._rounds, tick)
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
        stats = self._sender.stats
        self._say(weights=stats)
        return metrics | {
            "time/transfer_s": report.transfer_s,
            "fleet/generators": float(len(report.members)),
            "sync/attempts": float(report.attempts),
            **{f"sync/{name}": value for name, value in stats.items()},
        }

    @contextlib.contextmanager
    def _syncing(self) -> Iterator[None]:
        self._say(phase="syncing", version=self._version)
        began = time.monotonic()
        try:
            yield
        except Alone:
            self._delivered = None
        finally:
            self._say(paused=False)
            self.spent_s += time.monotonic() - began

    def _published(self, report: SyncReport | None) -> None:
        if report is not None:
            self._delivered = report
            self._recovery.published(report.version)

    def _send_on_all(self, version: int, fence: int, damaged: bool) -> None:
        try:
            self._commands.lead("send", (version, fence, damaged))
        except SendFailed:
            self._commands.keep_waiting()  # the other ranks have finished gathering and wait for the next command
            raise
