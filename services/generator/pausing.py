"""A generator's side of an operator's pause (services/store/records.py, PauseMode).

Guarantees: the pod says that a pause holds once it does: no token is sampled (`keep`), or nothing is under way any more (`drain`,
`abort`); that it works again once it does. Tickets are claimed by nobody meanwhile: `claim` is refused in Redis.
Waits for: a pause, the engine, the end of what is under way. Unblocked by: the view (`pause`), the weight follower, which stops
and starts the engine (`frozen`), the lanes (`room`, `evaluated`).
"""

from __future__ import annotations

from collections.abc import Sequence

from services.generator.rollouts.worker import Lane
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.weights.member import WeightFollower

LOOK_S = 1.0  # a missed ring costs at most this much


class Pausing:
    """Carries out what a pause asks of the lanes, and says when it holds."""

    def __init__(self, service: Service, weights: WeightFollower, lanes: Sequence[Lane]) -> None:
        self.service, self._weights, self._lanes = service, weights, lanes
        self._topics = ("pause", "frozen", *(lane.room for lane in lanes))

    async def follow(self, loop: Loop) -> None:
        """Follow operators' pauses for ever."""
        while True:
            mode = self.service.view.pause_mode
            for lane in self._lanes if mode == "abort" else ():
                await lane.abort()
            if mode == "keep":
                holds = self._weights.frozen
            else:
                holds = mode is not None and not any(lane.rollouts for lane in self._lanes)
            self.service.say(paused=mode if mode and holds else "")
            loop.progress()
            await self.service.bell.wait(*self._topics, timeout=LOOK_S)
