"""Start the scaler of a cluster: `grpo scale` and `kubectl scale` come to the same.

GRPO_DEPLOYMENT names the generators' Deployment.

Waits for: the run's wish, the Deployment's replicas. Unblocked by: `control`, or a look every `POLL_S`.
"""

from __future__ import annotations

import logging
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
POLL_S = 5.0  # how late `kubectl scale` shows in `grpo status`; the wish is followed at once
LIMIT_S = 120.0  # a cluster's API may be away for longer than a look


async def follow(service: Service, deployment: Deployment, loop: Loop) -> None:
    """Keep the wish and the Deployment the same until the pod is told to stop."""
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
            return  # looked at anew in a moment
        log.info("generators scaled", replicas=decision.replicas, why=scale.why)
    if decision.wish is not None:
        await service.store.run.scale_generators(decision.wish, "the Deployment was scaled")
        log.info("the Deployment was scaled", replicas=decision.wish)
    if decision.followed is not None:
        await service.store.run.followed_generators(decision.followed)


async def keep(given: Arguments) -> None:
    """The whole life of the pod."""
    name = os.environ.get(DEPLOYMENT_ENV, "")
    if not name:
        raise ConfigError(f"no Deployment is named: set the environment variable {DEPLOYMENT_ENV}")
    deployment = Deployment.in_cluster(name, os.environ)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each look is too many
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
