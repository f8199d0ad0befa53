"""The generator pod's main loop survives what its calls of Redis raise."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.console.run.redis_server import RedisServer
from services.generator.loop import GeneratorLoop
from services.generator.pod import GeneratorPod
from services.http.entry import open_service
from services.protocol.errors import RedisUnreachable
from services.store import Store
from services.verifiers.scoring import Scoring
from tests.support.harness import save_tokenizer_folder, small_config, wait_until
from tests.support.scripted import ScriptedEngine


async def test_a_long_outage_of_redis_loads_nothing_twice(
    server: RedisServer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start would hand each verifier worker to two groups at a time, and leave the first engine behind."""
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    save_tokenizer_folder(Path(config.model.path))
    await store.run.create("config", "data", 4, 8)
    calls = Counter[str]()
    for owner in (ScriptedEngine, Scoring):
        counted(owner, calls, monkeypatch)

    async def failing(self: GeneratorLoop) -> int:
        calls["claim"] += 1
        if calls["claim"] < 4:
            raise RedisUnreachable("no answer for 9 s")
        return 0

    monkeypatch.setattr(GeneratorLoop, "claim", failing)
    async with open_service("generator", config, "generator-0") as service:
        running = asyncio.create_task(GeneratorPod(service).run())
        await wait_until(lambda: calls["claim"] > 5)
        service.stop()
        await running
    assert (calls["ScriptedEngine"], calls["Scoring"]) == (1, 1)


def counted(owner: type[Any], calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Count calls of a class's `start` by the class's name."""
    start = owner.start

    async def starting(self: Any, *given: Any) -> None:
        calls[owner.__name__] += 1
        await start(self, *given)

    monkeypatch.setattr(owner, "start", starting)
