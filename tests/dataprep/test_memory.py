"""No prompt is issued if Redis might lack the memory for its group."""

from __future__ import annotations

import pytest

from services.dataprep import brakes
from services.dataprep.brakes import MemoryGuard
from services.store import Store


async def test_a_nearly_full_server_holds_prompts_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brakes, "POLL_S", 0.0)
    assert not await MemoryGuard(store).full(), "a server without a limit is never full"
    guard = MemoryGuard(store)
    seen: list[bool] = []
    try:
        for share in (0.5, 0.89, 0.9, 0.86, 0.84, 0.89):
            await store.client.config_set("maxmemory", int((await store.run.memory())[0] / share))
            seen.append(await guard.full())
        assert seen == [False, False, True, True, False, False]
        await store.client.config_set("maxmemory", 2**20)
        assert (await store.run.memory())[1] == 2**20
        assert await guard.full()
        assert "of 1 MiB: lower replay.capacity or checkpoint.every_steps, or raise the server's maxmemory" in guard.why
    finally:
        await store.client.config_set("maxmemory", 0)
