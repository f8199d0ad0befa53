"""Fixtures for tests of the replay table."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from services.store import Store
from tests.store.replay.draws import Bench, loaded_as
from tests.store.replay.tables import begin


@pytest_asyncio.fixture
async def bench(store: Store) -> AsyncIterator[Bench]:
    """Yield a prioritized table for many draws."""
    name, code = loaded_as()
    await store.client.execute_command("FUNCTION", "LOAD", "REPLACE", code)
    yield Bench(store, await begin(store, "prioritized"), name)
    await store.client.execute_command("FUNCTION", "DELETE", name)
