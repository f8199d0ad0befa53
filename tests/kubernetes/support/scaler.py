"""A scaler that tests poll explicitly."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from services.console.run.redis_server import RedisServer
from services.http.entry import open_service
from services.scaler.__main__ import ReleaseFollower, ScalerSettings
from services.scaler.workload import KubernetesApi
from services.store import Store
from tests.support.harness import small_config

SETTINGS = ScalerSettings("demo-generator", 3, "demo-trainer", trainer_replicas=2, notes="demo-scaler")


@contextlib.asynccontextmanager
async def following(
    store: Store, server: RedisServer, folder: Path, cluster: KubernetesApi, settings: ScalerSettings = SETTINGS
) -> AsyncIterator[ReleaseFollower]:
    """Yield a scaler that a test polls explicitly."""
    async with open_service("scaler", small_config(folder, server, f"run.name={store.keys.name}"), "scaler-0") as service:
        yield ReleaseFollower(service, settings, cluster)
