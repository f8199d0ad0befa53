"""Start the scaler of a cluster, which makes `grpo scale` and `kubectl scale` equivalent and frees the GPUs of a finished run.

Waits for: the requested number of generators, the replicas of the release's objects, the end of the run. Unblocked by: `control`,
or a poll every `POLL_S`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, Self

import msgspec
import structlog

from services.config import ConfigError
from services.http.entry import Arguments, end_process, main, open_service
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.scaler.reconcile import UNSET, decide, untouched, whole_or_none
from services.scaler.workload import KubernetesApi, Replicas, Workload, WorkloadChanged
from services.store.records import RunState, Scale

log = structlog.get_logger()

SETTINGS_ENV = "GRPO_SCALER"
POLL_S = 5.0  # delay until `kubectl scale` shows in `grpo status`; a request is followed at once
LIMIT_S = 120.0  # a cluster's API may be unavailable for longer than a poll
EMPTYING, EMPTIED = "emptying", "emptied"
"""Stages of a note about an object: a scaler that was interrupted sets it to zero again, unless it had done so."""


class ScalerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The objects of a release, which the chart writes as JSON into the environment variable `GRPO_SCALER`."""

    deployment: str = ""
    """The generators' Deployment; empty: an autoscaler sets its number."""
    replicas: int = UNSET
    trainer: str = ""
    trainer_kind: Literal["StatefulSet", "LeaderWorkerSet"] = "StatefulSet"
    trainer_replicas: int = 1
    """Number of its pods, or of a LeaderWorkerSet its groups, which is one."""
    keep: bool = False
    """Whether a finished run keeps its pods."""
    judge: str = ""
    """Its Deployment; empty: the release has none."""
    judge_replicas: int = UNSET
    notes: str = ""
    """The ConfigMap in which the scaler notes which of these objects it has emptied."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the environment. Raises `ConfigError` for invalid values."""
        try:
            settings = msgspec.json.decode(environ.get(SETTINGS_ENV, ""), type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{SETTINGS_ENV} = {environ.get(SETTINGS_ENV)!r}: {error}; the chart writes it") from None
        if not settings.notes or not settings.trainer:
            raise ConfigError(f"{SETTINGS_ENV} needs `trainer` and `notes`: the names of an object to scale and of a ConfigMap")
        return settings


class ReleaseFollower:
    """Keeps the objects of a release in agreement with its run.

    Guarantees: an object is emptied once per finished run. The note about it also holds for the next run of the release, which
    gets its pods back, and is void once the object is recreated, since it contains the object's uid.
    """

    def __init__(self, service: Service, settings: ScalerSettings, cluster: KubernetesApi) -> None:
        self._service, self._settings = service, settings
        self._generators = cluster.workload("Deployment", settings.deployment) if settings.deployment else None
        others = (
            (settings.trainer_kind, settings.trainer, settings.trainer_replicas),
            ("Deployment", settings.judge, settings.judge_replicas),
        )
        self._others = [(cluster.workload(kind, name), replicas) for kind, name, replicas in others if name]
        self._cluster, self._notes = cluster, dict[str, str]()
        self._begun = False  # the first number has been set, before the run existed

    async def follow(self, loop: Loop) -> None:
        """Repeat `once` until the pod is stopped."""
        while not self._service.stopping.is_set():
            try:
                await self.once(await self._service.view.refresh())
            except WorkloadChanged as error:
                log.info("changed concurrently, reading it again", error=str(error))
            loop.progress()
            await self._service.notifications.wait("control", timeout=POLL_S)

    async def once(self, state: RunState | None) -> None:
        """Compare once, and set the differences. Raises `WorkloadChanged` after a concurrent change."""
        self._notes = await self._cluster.notes(self._settings.notes)
        if state is not None and state.finished:
            for workload in (self._generators, *(workload for workload, _ in self._others)):
                if workload is not None and not self._settings.keep:
                    await self._empty(workload)
            return
        for workload, whole in self._others:
            seen = await workload.replicas()
            replicas = whole_or_none(whole, seen.count, self._noted(workload, seen))
            await self._scale(workload, seen, replicas, "the number in the values")
            await self._clear(workload)
        if self._generators is None:
            if state is not None and state.scale.object:
                await self._service.store.run.followed_object("")
        elif state is not None:
            await self._agree(self._generators, state.scale)
        elif not self._begun:
            await self._begin(self._generators)

    async def _agree(self, generators: Workload, scale: Scale) -> None:
        seen, run = await generators.replicas(), self._service.store.run
        decision = decide(scale, seen.count, seen.uid, self._settings.replicas, self._noted(generators, seen))
        await self._scale(generators, seen, decision.replicas, scale.why)
        if decision.requested is not None:
            await run.scale_generators(decision.requested, "the Deployment was scaled")
            log.info("the Deployment was scaled", replicas=decision.requested)
        if decision.followed is not None:
            await run.followed_generators(decision.followed)
        if decision.object is not None:
            await run.followed_object(decision.object)
        await self._clear(generators)

    async def _begin(self, generators: Workload) -> None:
        """Set the first number while dataprep still reads the prompts, so that generators load meanwhile."""
        seen = await generators.replicas()
        if untouched(seen.count, self._noted(generators, seen)):
            await self._scale(generators, seen, self._settings.replicas, "initial number")
        await self._clear(generators)
        self._begun = True

    async def _scale(self, workload: Workload, seen: Replicas, replicas: int | None, why: str) -> None:
        """Set the replicas, unless they are None or those that were seen."""
        if replicas is not None and replicas != seen.count:
            await workload.scale(replicas, seen)
            log.info("scaled", name=workload.name, replicas=replicas, why=why)

    async def _empty(self, workload: Workload) -> None:
        """Free the GPUs of a finished run. Interrupted anywhere, it is repeated, or undone if a run needs them meanwhile."""
        seen = await workload.replicas()
        if self._noted(workload, seen, EMPTIED):
            return
        await self._note(workload, seen, EMPTYING)
        await self._scale(workload, seen, 0, "the run has finished")
        await self._note(workload, seen, EMPTIED)

    def _noted(self, workload: Workload, seen: Replicas, *stages: str) -> bool:
        """Return whether there is a note of one of the stages, by default of any, about this very object."""
        return self._notes.get(workload.name) in [f"{stage} {seen.uid}" for stage in stages or (EMPTYING, EMPTIED)]

    async def _note(self, workload: Workload, seen: Replicas, stage: str) -> None:
        await self._cluster.note(self._settings.notes, workload.name, f"{stage} {seen.uid}")

    async def _clear(self, workload: Workload) -> None:
        if self._notes.pop(workload.name, None) is not None:
            await self._cluster.note(self._settings.notes, workload.name, None)


async def keep(given: Arguments) -> None:
    """Run the pod from start to end."""
    settings = ScalerSettings.from_environment(os.environ)
    cluster = KubernetesApi.in_cluster(os.environ)
    try:
        async with open_service("scaler", given.config, given.name) as service:
            service.stays = True  # a finished run may be resumed
            follower = ReleaseFollower(service, settings, cluster)

            async def work(loop: Loop) -> None:
                service.say(phase="ready")
                await follower.follow(loop)

            await service.run(work, LIMIT_S)
    finally:
        await cluster.close()


if __name__ == "__main__":
    end_process(main("scaler", keep))
