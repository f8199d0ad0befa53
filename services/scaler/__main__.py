"""Start the scaler of a cluster, which makes `grpo scale` and `kubectl scale` equivalent and frees the GPUs of a finished run.

The environment names the objects that it scales (GRPO_DEPLOYMENT, GRPO_REPLICAS; GRPO_SET, GRPO_SET_KIND, GRPO_SET_REPLICAS;
GRPO_JUDGE, GRPO_JUDGE_REPLICAS), whether a finished run keeps its pods (GRPO_ON_FINISH), and whether pods are marked with what
their removal would cost (GRPO_DELETION_COST).

Waits for: the requested number of generators, the replicas of these objects, the end of the run. Unblocked by: `control`, or a
poll every `POLL_S`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import structlog

from services.config import ConfigError
from services.http.entry import Arguments, end_process, main, open_service
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.scaler.deletion_cost import DeletionCosts
from services.scaler.reconcile import EMPTYING, FINISHED, UNSET, decide, whole_or_none
from services.scaler.workload import KubernetesApi, Workload, WorkloadChanged
from services.store.records import RunState, Scale

log = structlog.get_logger()

DEPLOYMENT_ENV = "GRPO_DEPLOYMENT"
REPLICAS_ENV = "GRPO_REPLICAS"
SET_ENV = "GRPO_SET"
SET_KIND_ENV = "GRPO_SET_KIND"
SET_REPLICAS_ENV = "GRPO_SET_REPLICAS"
JUDGE_ENV = "GRPO_JUDGE"
JUDGE_REPLICAS_ENV = "GRPO_JUDGE_REPLICAS"
ON_FINISH_ENV = "GRPO_ON_FINISH"
DELETION_COST_ENV = "GRPO_DELETION_COST"
ON_FINISH = ("scaleToZero", "keep")
SET_KINDS = ("StatefulSet", "LeaderWorkerSet")
POLL_S = 5.0  # delay until `kubectl scale` shows in `grpo status`; a request is followed at once
LIMIT_S = 120.0  # a cluster's API may be unavailable for longer than a poll


@dataclass(frozen=True)
class ScalerSettings:
    """The chart's settings of the scaler's objects."""

    deployment: str = ""
    """The generators' Deployment; empty: an autoscaler sets its number."""
    replicas: int = UNSET
    trainer: str = ""
    trainer_kind: str = "StatefulSet"
    trainer_replicas: int = 1
    """Number of its pods, or of a LeaderWorkerSet its groups, which is one."""
    keep: bool = False
    deletion_cost: bool = False
    judge: str = ""
    """Its Deployment; empty: the release has none."""
    judge_replicas: int = UNSET

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the environment. Raises `ConfigError` for invalid values."""
        if not environ.get(DEPLOYMENT_ENV) and not environ.get(SET_ENV):
            raise ConfigError(
                f"neither {DEPLOYMENT_ENV} nor {SET_ENV} is set: set one to the name of the generators' Deployment or of the "
                "trainer's StatefulSet"
            )
        for name, allowed in ((ON_FINISH_ENV, ON_FINISH), (SET_KIND_ENV, SET_KINDS)):
            if environ.get(name, allowed[0]) not in allowed:
                raise ConfigError(f"{name} = {environ[name]!r} must be one of {', '.join(allowed)}")
        names = (REPLICAS_ENV, SET_REPLICAS_ENV, JUDGE_REPLICAS_ENV)
        try:
            generators, trainer, judge = (int(environ.get(name, UNSET)) for name in names)
        except ValueError as error:
            raise ConfigError(f"{', '.join(names)} must be numbers: {error}") from None
        return cls(
            environ.get(DEPLOYMENT_ENV, ""), generators,
            environ.get(SET_ENV, ""), environ.get(SET_KIND_ENV, SET_KINDS[0]), trainer,
            environ.get(ON_FINISH_ENV) == "keep", environ.get(DELETION_COST_ENV) == "true",
            environ.get(JUDGE_ENV, ""), judge,
        )  # fmt: skip


class ReleaseFollower:
    """Keeps the objects of a release in agreement with its run."""

    def __init__(self, service: Service, settings: ScalerSettings, cluster: KubernetesApi) -> None:
        self._service, self._settings = service, settings
        self._generators = cluster.workload("Deployment", settings.deployment) if settings.deployment else None
        self._trainer = cluster.workload(settings.trainer_kind, settings.trainer) if settings.trainer else None
        self._judge = cluster.workload("Deployment", settings.judge) if settings.judge else None
        self._costs = DeletionCosts(cluster) if settings.deletion_cost else None
        self._begun = False  # the first number has been set, before the run existed

    async def follow(self, loop: Loop) -> None:
        """Repeat `once` until the pod is stopped."""
        while not self._service.stopping.is_set():
            try:
                await self.once(await self._service.view.refresh())
                if self._costs is not None:
                    await self._costs.follow(await self._service.store.fleet.members(self._service.config.fleet.ttl_s))
            except WorkloadChanged as error:
                log.info("changed concurrently, reading it again", error=str(error))
            loop.progress()
            await self._service.notifications.wait("control", timeout=POLL_S)

    async def once(self, state: RunState | None) -> None:
        """Compare once, and set the differences. Raises `WorkloadChanged` after a concurrent change."""
        if state is not None and state.finished:
            if not self._settings.keep and state.scale.object != FINISHED:
                await self._empty()
            return
        await self._size(self._trainer, self._settings.trainer_replicas, state)
        await self._size(self._judge, self._settings.judge_replicas, state)
        if self._generators is None:
            if state is not None and state.scale.object:
                await self._service.store.run.followed_object("")
        elif state is not None:
            await self._agree(self._generators, state.scale)
        elif not self._begun:
            await self._begin(self._generators)

    async def _agree(self, generators: Workload, scale: Scale) -> None:
        seen, run = await generators.replicas(), self._service.store.run
        decision = decide(scale, seen.count, seen.uid, self._settings.replicas)
        if decision.replicas is not None:
            await generators.scale(decision.replicas, seen)
            log.info("generators scaled", replicas=decision.replicas, why=scale.why)
        if decision.requested is not None:
            await run.scale_generators(decision.requested, "the Deployment was scaled")
            log.info("the Deployment was scaled", replicas=decision.requested)
        if decision.followed is not None:
            await run.followed_generators(decision.followed)
        if decision.object is not None:
            await run.followed_object(decision.object)

    async def _begin(self, generators: Workload) -> None:
        """Set the first number while dataprep still reads the prompts, so that generators load meanwhile."""
        seen = await generators.replicas()
        if seen.count == UNSET != self._settings.replicas:
            await generators.scale(self._settings.replicas, seen)
            log.info("generators scaled", replicas=self._settings.replicas, why="initial number")
        self._begun = True

    async def _size(self, workload: Workload | None, whole: int, state: RunState | None) -> None:
        """Scale the trainer or the judge to the number in the values, unless it was scaled to 0."""
        if workload is None:
            return
        seen = await workload.replicas()
        emptied = state is not None and state.scale.object in (EMPTYING, FINISHED)
        if (replicas := whole_or_none(whole, seen.count, emptied)) is not None:
            await workload.scale(replicas, seen)
            log.info("scaled to the number in the values", name=workload.name, replicas=replicas)

    async def _empty(self) -> None:
        """Free the GPUs of a finished run. Interrupted anywhere, it is repeated, or undone if the run was resumed meanwhile."""
        await self._service.store.run.followed_object(EMPTYING)
        if self._generators is not None:
            await self._service.store.run.followed_generators(0)
        for workload in (self._generators, self._trainer, self._judge):
            if workload is not None and (seen := await workload.replicas()).count:
                await workload.scale(0, seen)
                log.info("scaled to zero, since the run has finished", name=workload.name)
        await self._service.store.run.followed_object(FINISHED)


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
