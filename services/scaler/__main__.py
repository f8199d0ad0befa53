"""Start the scaler of a cluster, which makes `grpo scale` and `kubectl scale` equivalent and frees the GPUs of a finished run.

The environment names the objects that it scales (GRPO_DEPLOYMENT, GRPO_REPLICAS; GRPO_SET, GRPO_SET_KIND, GRPO_SET_REPLICAS;
GRPO_JUDGE, GRPO_JUDGE_REPLICAS) and the ConfigMap with its own notes (GRPO_NOTES); whether a finished run keeps its pods
(GRPO_ON_FINISH), and whether pods are marked with what their removal would cost (GRPO_DELETION_COST).

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
from services.scaler.freed import EMPTIED, EMPTYING, Freed
from services.scaler.reconcile import UNSET, decide, untouched, whole_or_none
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
NOTES_ENV = "GRPO_NOTES"
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
    notes: str = ""
    """The ConfigMap in which the scaler notes which of these objects it has emptied."""

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
        if not environ.get(NOTES_ENV):
            raise ConfigError(f"{NOTES_ENV} is not set: set it to the name of a ConfigMap that the scaler may read and patch")
        return cls(
            environ.get(DEPLOYMENT_ENV, ""), generators,
            environ.get(SET_ENV, ""), environ.get(SET_KIND_ENV, SET_KINDS[0]), trainer,
            environ.get(ON_FINISH_ENV) == "keep", environ.get(DELETION_COST_ENV) == "true",
            environ.get(JUDGE_ENV, ""), judge, environ[NOTES_ENV],
        )  # fmt: skip


class ReleaseFollower:
    """Keeps the objects of a release in agreement with its run."""

    def __init__(self, service: Service, settings: ScalerSettings, cluster: KubernetesApi) -> None:
        self._service, self._settings = service, settings
        self._generators = cluster.workload("Deployment", settings.deployment) if settings.deployment else None
        self._trainer = cluster.workload(settings.trainer_kind, settings.trainer) if settings.trainer else None
        self._judge = cluster.workload("Deployment", settings.judge) if settings.judge else None
        self._freed = Freed(cluster, settings.notes)
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
        await self._freed.refresh()
        if state is not None and state.finished:
            for workload in (self._generators, self._trainer, self._judge):
                if workload is not None and not self._settings.keep:
                    await self._empty(workload)
            return
        await self._size(self._trainer, self._settings.trainer_replicas)
        await self._size(self._judge, self._settings.judge_replicas)
        if self._generators is None:
            if state is not None and state.scale.object:
                await self._service.store.run.followed_object("")
        elif state is not None:
            await self._agree(self._generators, state.scale)
        elif not self._begun:
            await self._begin(self._generators)

    async def _agree(self, generators: Workload, scale: Scale) -> None:
        seen, run = await generators.replicas(), self._service.store.run
        decision = decide(scale, seen.count, seen.uid, self._settings.replicas, self._freed.holds(generators, seen))
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
        await self._freed.clear(generators)

    async def _begin(self, generators: Workload) -> None:
        """Set the first number while dataprep still reads the prompts, so that generators load meanwhile."""
        seen = await generators.replicas()
        if untouched(seen.count, self._freed.holds(generators, seen)) and seen.count != self._settings.replicas:
            await generators.scale(self._settings.replicas, seen)
            log.info("generators scaled", replicas=self._settings.replicas, why="initial number")
        await self._freed.clear(generators)
        self._begun = True

    async def _size(self, workload: Workload | None, whole: int) -> None:
        """Scale the trainer or the judge to the number in the values, unless an operator scaled it to 0."""
        if workload is None:
            return
        seen = await workload.replicas()
        if (replicas := whole_or_none(whole, seen.count, self._freed.holds(workload, seen))) is not None:
            await workload.scale(replicas, seen)
            log.info("scaled to the number in the values", name=workload.name, replicas=replicas)
        await self._freed.clear(workload)

    async def _empty(self, workload: Workload) -> None:
        """Free the GPUs of a finished run. Interrupted anywhere, it is repeated, or undone if a run needs them meanwhile."""
        seen = await workload.replicas()
        if self._freed.holds(workload, seen, EMPTIED):
            return
        await self._freed.mark(workload, seen, EMPTYING)
        if seen.count:
            await workload.scale(0, seen)
            log.info("scaled to zero, since the run has finished", name=workload.name)
        await self._freed.mark(workload, seen, EMPTIED)


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
