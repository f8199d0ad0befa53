"""Start the scaler of a cluster, which makes `grpo scale` and `kubectl scale` equivalent.

GRPO_DEPLOYMENT names the generators' Deployment.

Waits for: the requested number of generators, the Deployment's replicas. Unblocked by: `control`, or a poll every `POLL_S`.
"""

from __future__ import annotations

import os
import sys

import structlog

from services.config import ConfigError
from services.runtime.entry import Arguments, main, open_service
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.scaler.deployment import Deployment, DeploymentChanged
from services.scaler.reconcile import decide
from services.store.records import Scale

log = structlog.get_logger()

DEPLOYMENT_ENV = "GRPO_DEPLOYMENT"
POLL_S = 5.0  # delay until `kubectl scale` shows in `grpo status`; a request is followed at once
LIMIT_S = 120.0  # a cluster's API may be unavailable for longer than a poll


async def follow(service: Service, deployment: Deployment, loop: Loop) -> None:
    """Keep the requested number and the Deployment in agreement until the pod is stopped."""
    while not service.stopping.is_set():
        if state := await service.view.refresh():
            await _follow_once(service, deployment, state.scale)
        loop.progress()
        await service.notifications.wait("control", timeout=POLL_S)


async def _follow_once(service: Service, deployment: Deployment, scale: Scale) -> None:
    replicas = await deployment.replicas()
    decision = decide(scale, replicas.count)
    if decision.replicas is not None:
        try:
            await deployment.scale(decision.replicas, replicas)
        except DeploymentChanged:
            return  # it is read again at the next poll
        log.info("generators scaled", replicas=decision.replicas, why=scale.why)
    if decision.wish is not None:
        await service.store.run.scale_generators(decision.wish, "the Deployment was scaled")
        log.info("the Deployment was scaled", replicas=decision.wish)
    if decision.followed is not None:
        await service.store.run.followed_generators(decision.followed)


async def keep(given: Arguments) -> None:
    """Run the pod from start to end."""
    name = os.environ.get(DEPLOYMENT_ENV, "")
    if not name:
        raise ConfigError(f"the environment variable {DEPLOYMENT_ENV} is not set: set it to the generators' Deployment")
    deployment = Deployment.in_cluster(name, os.environ)
    try:
        async with open_service("scaler", given.config, given.name) as service:

            async def work(loop: Loop) -> None:
                service.say(phase="ready")
                await follow(service, deployment, loop)

            await service.run(work, LIMIT_S)
    finally:
        await deployment.close()


if __name__ == "__main__":
    sys.exit(main("scaler", keep))
