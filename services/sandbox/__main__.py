"""Start the sandbox service of a cluster: it creates, assigns and sweeps the pods in which the policy's code runs.

The environment sets its options (GRPO_SANDBOX_TEMPLATE, GRPO_SANDBOX_NAMESPACE, GRPO_SANDBOX_WARM, GRPO_RELEASE).

Waits for: environments' requests, pods that were assigned, claims that end. Unblocked by: requests, or a poll every `SWEEP_S`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import structlog

from services.http.entry import Arguments, end_process, main, open_service
from services.protocol.errors import StoreError
from services.runtime.cluster.account import ACCOUNT, ClusterError, in_cluster
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.sandbox.api import add_routes
from services.sandbox.keeper import SandboxKeeper
from services.sandbox.metrics import SandboxMetrics
from services.sandbox.pods import PodsApi
from services.sandbox.settings import SandboxSettings

log = structlog.get_logger()

SWEEP_S = 5.0
LIMIT_S = 120.0  # a cluster's API may be unavailable for longer than a sweep takes


async def sweep_until_stopped(service: Service, keeper: SandboxKeeper, loop: Loop) -> None:
    """Sweep every few seconds, and when a pod that was ready has been assigned."""
    stopped = asyncio.ensure_future(service.stopping.wait())
    while not service.stopping.is_set():
        try:
            await keeper.sweep()
            service.say(phase="ready")
        except (ClusterError, StoreError) as error:
            log.warning("not swept", error=str(error))
        loop.progress()
        taken = asyncio.ensure_future(keeper.taken.wait())
        await asyncio.wait([stopped, taken], timeout=SWEEP_S, return_when=asyncio.FIRST_COMPLETED)
        taken.cancel()
    stopped.cancel()


async def keep(given: Arguments, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> None:
    """Run the pod from start to end."""
    settings = SandboxSettings.from_environment(environ)
    configuration, namespace = in_cluster("the sandbox service", environ, account)
    pods = PodsApi(configuration, settings.namespace or namespace)
    try:
        async with open_service("sandbox", given.config, given.name) as service:
            service.stays = True  # a finished run may be resumed, and what it has left is swept
            keeper = SandboxKeeper(pods, settings, service.store.tickets.fences, SandboxMetrics(service.registry))
            add_routes(service, keeper)

            async def work(loop: Loop) -> None:
                await sweep_until_stopped(service, keeper, loop)

            await service.run(work, LIMIT_S)
    finally:
        await pods.close()


if __name__ == "__main__":
    end_process(main("sandbox", keep))
