"""Carries an operator's verbs out through the endpoints of a service, where the run's Redis cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from services.http.client import Client
from services.http.models import Desired
from services.operations.control import InvalidRequest, modes_of
from services.operations.inspection.checkpoints import AskedCheckpoint, AskedRestore
from services.operations.inspection.deadletters import RequeueAnswer
from services.store.records import PauseMode, Role


class HttpControl:
    """The verbs of `Control`, each a request by `client`; errors are its `ApiError`s."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def pause(self, roles: Sequence[Role], mode: PauseMode, why: str, who: str, wait_s: float = 0.0) -> list[str]:
        """Pause roles until they are resumed. Return the pods not paused yet."""
        modes = modes_of(roles, mode)
        return await _left(partial(self._client.pause, role, each, why, who, wait_s) for role, each in modes.items())

    async def resume(self, roles: Sequence[Role], why: str, who: str, wait_s: float = 0.0) -> list[str]:
        """Resume roles. Return the pods that have not resumed yet."""
        return await _left(partial(self._client.resume, role, why, who, wait_s) for role in roles)

    async def stop(self, why: str, who: str, wait_s: float = 0.0) -> list[str]:
        """End the run after the step in training. The service is dataprep."""
        return (await asyncio.to_thread(self._client.stop_run, why, who, wait_s)).waiting_for

    async def scale(self, replicas: int, why: str, who: str, wait_s: float = 0.0) -> list[str]:
        """Set the number of generators. Return the surplus and the missing ones."""
        return (await asyncio.to_thread(self._client.scale, replicas, why, who, wait_s)).waiting_for

    async def checkpoint(self, why: str, who: str, wait_s: float = 0.0) -> AskedCheckpoint:
        """Request a checkpoint. The service is the trainer."""
        return await asyncio.to_thread(self._client.checkpoint, why, who, wait_s)

    async def restore(self, step: int, why: str, who: str, wait_s: float = 0.0) -> AskedRestore:
        """Restore the run to the checkpoint of `step`. The service is the trainer."""
        return await asyncio.to_thread(self._client.restore, step, why, who, wait_s)

    async def requeue(self, ids: Sequence[str] | None, reason: str = "") -> RequeueAnswer:
        """Requeue dead letters: those named, or all. The service is dataprep."""
        if reason:
            raise InvalidRequest("dead letters cannot be selected by reason through --api: give their ids, or --all")
        return await asyncio.to_thread(self._client.requeue, "all" if ids is None else list(ids))


async def _left(requests: Iterable[Callable[[], Desired]]) -> list[str]:
    """Send requests at the same time, so that no role's request waits until another role has complied. Return the pods that have
    not. Each is sent once: a later repetition could undo what somebody else has requested since.
    """
    answers = await asyncio.gather(*(asyncio.to_thread(request) for request in requests))
    return [pod for answer in answers for pod in answer.waiting_for]
