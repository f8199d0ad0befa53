"""A generator that fetches the published weights from the store of versions itself, while the trainer trains.

Guarantees: it never goes back to an older version; while it fetches, it says so in its heartbeat, before it reads anything, so
that rounds exclude it and nothing that it reads is deleted; weights that could not be fetched or applied are fetched again, at
growing intervals.
Waits for: the published version, the store.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog

from services.protocol.errors import StoreError
from services.protocol.messages import Round
from services.runtime.loops import end_tasks
from services.runtime.service import Service
from services.weights.receiver import TransferFailed, WeightReceiver

log = structlog.get_logger()

LIMIT_S = 6 * 3600.0  # an anchor over a slow link may take long, but delays nobody
AGAIN_S = (1.0, 30.0)  # after a failure: first and longest pause


@dataclass(frozen=True)
class Published:
    """A version and the fence of the trainer that published it."""

    fence: int
    version: int


class CatchUp:
    """Fetches in its own task. The follower of rounds starts it and applies the fetched weights."""

    def __init__(self, service: Service, engine: WeightReceiver) -> None:
        self._service, self._engine = service, engine
        self._task: asyncio.Task[None] | None = None
        self._target = Published(0, -1)
        self._failed, self._failures, self._not_before = "", 0, 0.0  # reason for the last failure, number in a row

    @property
    def busy(self) -> bool:
        """Return whether a fetch is running, or has finished and is not applied yet."""
        return self._task is not None

    async def step(self) -> Published | None:
        """Begin a fetch if the pod is behind. Returns a version that has been fetched, for the caller to apply before it calls
        `over`.

        Raises `TransferFailed` if a fetch failed, after which the caller calls `over`, and any error that ends the engine.
        """
        if self._task is None:
            wanted = self._behind()
            if wanted is not None and time.monotonic() >= self._not_before:
                self._target = wanted
                self._task = asyncio.create_task(self._fetch(wanted))
            return None
        if not self._task.done():
            return None
        try:
            await self._task
        except StoreError as error:
            raise TransferFailed(str(error)) from error
        return self._target

    def over(self, failure: TransferFailed | None = None) -> None:
        """Forget the fetch, and let rounds include the pod. `failure`: why its weights were not fetched or applied."""
        self._forget()
        if failure is None:
            self._failed, self._failures = "", 0
            return
        if str(failure) != self._failed:
            log.warning("failed to fetch or apply weights, retrying", error=str(failure))
        self._failed, self._failures = str(failure), self._failures + 1
        self._not_before = time.monotonic() + min(AGAIN_S[1], AGAIN_S[0] * 2.0 ** (self._failures - 1))

    async def close(self) -> None:
        """Abandon a fetch; the next `step` begins another."""
        if self._task is not None:
            await end_tasks([self._task])
            self._forget()

    def _forget(self) -> None:
        self._task = None
        self._service.say(fetching="")

    def _behind(self) -> Published | None:
        """Return the published version if the pod holds an older one or none."""
        state, status = self._service.view.state, self._service.status
        if state is None or state.published_version < 0 or not state.published_by:
            return None
        newer = (state.published_by, state.published_version) > (status.trainer_fence, status.version)
        return Published(state.published_by, state.published_version) if newer else None

    async def _fetch(self, wanted: Published) -> None:
        self._service.say(fetching=f"{wanted.fence}/0")
        await self._service.store.fleet.beat(self._service.status, self._service.config.fleet.ttl_s)
        place = Round(0, wanted.version, "join", {}, 0, "store", str(wanted.fence), 0, 0, wanted.fence)
        began = time.monotonic()
        await self._engine.join(place, 1)
        await self._engine.stage(wanted.version, LIMIT_S)
        log.info("fetched weights from the store", version=wanted.version, seconds=round(time.monotonic() - began, 3))
