"""No prompt is issued if Redis might lack the memory for its group."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.dataprep.replay import memory
from services.dataprep.replay.memory import MemoryGuard
from services.store import Store
from tests.support.harness import small_config


async def test_a_nearly_full_server_holds_prompts_back(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "POLL_S", 0.0)
    assert not await MemoryGuard(small_config(tmp_path), store).full(), "a server without a limit is never full"
    used, limit = await store.run.memory(7)
    assert (used > 2**19, limit) == (True, 7)
    guard = MemoryGuard(small_config(tmp_path, None, "redis.max_memory_mib=100"), store)
    seen: list[bool] = []
    for share in (0.5, 0.89, 0.9, 0.86, 0.84, 0.89):
        monkeypatch.setattr(guard, "_limit", int((await store.run.memory())[0] / share))
        seen.append(await guard.full())
    assert seen == [False, False, True, True, False, False]
    monkeypatch.setattr(guard, "_limit", 2**20)
    assert await guard.full()
    assert "of 1 MiB: lower replay.capacity or checkpoint.every_steps, or raise redis.max_memory_mib" in guard.why
