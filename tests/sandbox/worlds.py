"""A sandbox service in this process, on a cluster whose pods are local processes, and the tool that calls it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.environment.code_tool.sandboxed import SandboxService, SandboxTool
from services.environment.programs.frames import SandboxAccess
from services.http.api import serve
from services.http.credentials import ApiTokens
from services.protocol.messages import PodStatus
from services.protocol.sandboxes import derived_token
from services.runtime.cluster.account import in_cluster
from services.runtime.service import Service
from services.sandbox.api import add_routes
from services.sandbox.keeper import SandboxKeeper
from services.sandbox.metrics import SandboxMetrics
from services.sandbox.pods import PodsApi
from services.sandbox.settings import SandboxSettings
from tests.kubernetes.support.pod_cluster import PodCluster
from tests.support.harness import small_config

SETTINGS = SandboxSettings("demo-sandbox", "", "demo", 0)
TEMPLATE = {
    "metadata": {"name": "demo-sandbox"},
    "template": {
        "metadata": {"labels": {}},
        "spec": {"activeDeadlineSeconds": 3600, "containers": [{"name": "sandbox", "command": ["sleep", "infinity"]}]},
    },
}
OPERATE = "operate-token"


@dataclass
class SandboxWorld:
    """Objects available to a test."""

    cluster: PodCluster
    url: str = ""
    keeper: SandboxKeeper | None = None
    fences: set[str] = field(default_factory=lambda: {"7"})
    """Fences of the current claims."""
    services: list[SandboxService] = field(default_factory=list[SandboxService])

    def service(self) -> SandboxService:
        """Return a client of the service, as in a worker process."""
        self.services.append(SandboxService(SandboxAccess(self.url, derived_token(OPERATE))))
        return self.services[-1]

    def tool(self, rollout: str = "0-0.7.0.0", limit_s: float = 100.0, open_limit_s: float = 60.0) -> SandboxTool:
        """Return the tool of a rollout."""
        return SandboxTool(rollout, limit_s, 512, self.service(), open_limit_s)

    @property
    def kept(self) -> SandboxKeeper:
        """Return the keeper of the running service."""
        assert self.keeper is not None
        return self.keeper


@asynccontextmanager
async def kept(place: SandboxWorld, warm: int = 0) -> AsyncIterator[SandboxKeeper]:
    """Serve the endpoints of a sandbox service that has no state of a predecessor."""
    configuration, namespace = in_cluster("the test", place.cluster.environ, place.cluster.account)
    pods = PodsApi(configuration, namespace)

    async def fences() -> set[str]:
        return place.fences

    config = small_config(place.cluster.folder, None)
    nothing: object = None
    service = Service("sandbox", config, nothing, PodStatus("sandbox", "s", "b", "here", 1, "", "ready", 0, 1, {}))  # pyright: ignore[reportArgumentType]
    keeper = SandboxKeeper(pods, replace(SETTINGS, warm=warm), fences, SandboxMetrics(CollectorRegistry()))
    try:
        async with serve(service, ApiTokens(OPERATE)) as url:
            add_routes(service, keeper)
            before = place.url, place.keeper
            place.url, place.keeper = url, keeper
            yield keeper
            place.url, place.keeper = before
    finally:
        await pods.close()


@asynccontextmanager
async def sandboxes(folder: Path, warm: int = 0) -> AsyncIterator[SandboxWorld]:
    """Yield a cluster with a sandbox service; check that nothing of it is left afterwards."""
    place = SandboxWorld(PodCluster(folder, TEMPLATE))
    try:
        async with kept(place, warm):
            yield place
    finally:
        for service in place.services:
            service.close()
        place.cluster.close()


async def swept(place: SandboxWorld) -> None:
    """Sweep until nothing changes."""
    while True:
        before = [place.cluster.of_state(state) for state in ("warm", "held")]
        await place.kept.sweep()
        await asyncio.sleep(0.1)
        if before == [place.cluster.of_state(state) for state in ("warm", "held")]:
            return


async def warmed(place: SandboxWorld, count: int) -> None:
    """Sweep until `count` pods are ready and known to the service."""
    while len(place.kept._ready) < count:
        await place.kept.sweep()
        await asyncio.sleep(0.05)
