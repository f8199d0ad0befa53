"""Weights that have been sent: a thread waits until the fleet has applied them, and publishes them, while the trainer trains on.

Guarantees: a version is published as soon as its members have answered; the next round begins only after `finish`, which raises
what failed in the thread; a version that no member applied is sent again only while the trainer still has its weights.
Waits for: the members' answers. Unblocked by: `acks`, `fleet`. Unblocks: waits for `DELIVERED`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable

from services.protocol.errors import OutOfOrder
from services.weights.rounds.leader import Sent, Stopped, SyncReport, SyncRounds

DELIVERED = "delivered"
"""Topic of this process: `Delivery.done` has become true."""
POLL_S = 1.0  # how often `finish` calls `tick`


class Delivery:
    """Sends one version at a time."""

    def __init__(self, rounds: SyncRounds, tick: Callable[[], None]) -> None:
        """`tick` is called while `finish` waits."""
        self._rounds, self._tick = rounds, tick
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "weight-delivery")
        self._closing = threading.Event()
        self._sent: Sent | None = None
        self._outcome: concurrent.futures.Future[SyncReport | None] | None = None

    @property
    def pending(self) -> bool:
        """Return whether a version was sent and is not finished."""
        return self._sent is not None

    @property
    def done(self) -> bool:
        """Return whether the version has been delivered."""
        return self._outcome is None or self._outcome.done()

    def begin(self, version: int, ending: Callable[[], bool]) -> None:
        """Send `version`, and return once all of it is sent. Raises `Alone` if `ending` comes before there is a generator."""
        self._sent = self._rounds.send(version, ending)
        context = contextvars.copy_context()  # for what is logged
        self._outcome = self._thread.submit(context.run, self._await_answers, self._sent)
        self._outcome.add_done_callback(self._notify)

    def finish(self) -> SyncReport | None:
        """Wait until the version that was sent is published, or return None if no member applied it, or nothing was sent."""
        outcome, self._outcome, self._sent = self._outcome, None, None
        if outcome is None:
            return None
        while not outcome.done():
            self._tick()
            concurrent.futures.wait([outcome], POLL_S)
        return outcome.result()

    def finish_or_repeat(self, ending: Callable[[], bool]) -> SyncReport | None:
        """Wait like `finish`, but while no member applies the version, send it again from the trainer's weights.

        Raises `Alone`.
        """
        sent, report = self._sent, self.finish()
        if report is None and sent is not None:
            self._rounds.pause(ending)
            report = self._rounds.run(sent.transfer.version, ending, sent.first)
            self._publish(report.version)
        return report

    def close(self) -> None:
        """End the thread, and abandon what it waits for."""
        self._closing.set()
        self._thread.shutdown()

    def _await_answers(self, sent: Sent) -> SyncReport | None:
        if report := self._rounds.conclude(sent, self._still_open):
            self._publish(report.version)
        return report

    def _publish(self, version: int) -> None:
        """Publish, unless Redis has lost the commit of a step: the trainer repeats both, if it still can."""
        with contextlib.suppress(OutOfOrder):
            self._rounds.portal.call(self._rounds.store.steps.publish(self._rounds.fence, version))

    def _notify(self, _: concurrent.futures.Future[SyncReport | None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._rounds.portal.loop.call_soon_threadsafe(self._rounds.notifications.notify, DELIVERED)

    def _still_open(self) -> None:
        if self._closing.is_set():
            raise Stopped
