"""A cluster's API, served by this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from services.scaler.workload import KubernetesApi
from tests.kubernetes.support.api_server import ApiServer


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, KubernetesApi]]:
    server = ApiServer(tmp_path / "account", "127.0.0.1", "ml", "demo-generator")
    api = KubernetesApi.in_cluster(server.environ, tmp_path / "account")
    yield server, api
    await api.close()
    server.close()
