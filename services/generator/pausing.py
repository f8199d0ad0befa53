"""A generator's side of an operator's pause (services/store/records.py, PauseMode).

Guarantees: the pod reports a pause once it is in effect: no token is sampled (`keep`), or nothing is in progress (`drain`,
`abort`); it reports the end of the pause once it works again. Meanwhile no pod claims tickets, since Redis refuses `claim`.
Waits for: a pause, the engine, the end of work in progress. Unblocked by: the view (`pause`), the weight follower, which stops
and starts the engine (`frozen`), the workers (`room`, `evaluated`).
"""

from __future__ import annotations

from collections.abc import Sequence

from services.generator.rollouts.worker import RolloutWorker
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.weights.rounds.member import WeightFollower

POLL_S = 1.0  # the longest delay that a missed notification can cause


class Pausing:
    """Applies a pause to the workers and reports when it is in effect."""

    def __init__(self, service: Service, weights: WeightFollower, workers: Sequence[RolloutWorker]) -> None:
        self.service, self._weights, self._workers = service, weights, workers
        self._topics = ("pause", "frozen", *(worker.room for worker in workers))

    async def follow(self, loop: Loop) -> None:
        """Follow operators' pauses until cancelled."""
        while True:
            mode = self.service.view.pause_mode
            for worker in self._workers if mode == "abort" else ():
                await worker.abort()
            if mode == "keep":
                holds = self._weights.frozen
            else:
                holds = mode is not None and not any(worker.busy for worker in self._workers)
            self.service.say(paused=mode if mode and holds else "")
            loop.progress()
            await self.service.notifications.wait(*self._topics, timeout=POLL_S)
