"""The metric of a generator's activities counts every second once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.console.run.redis_server import RedisServer
from services.generator import pod as pods
from services.generator.pod import GeneratorPod
from services.http.entry import open_service
from services.runtime import activity
from services.runtime.loops import Loop, end_tasks
from services.store import Store
from tests.support.harness import save_tokenizer_folder, small_config, wait_until


async def test_every_second_is_counted_once(
    server: RedisServer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    save_tokenizer_folder(Path(config.model.path))
    monkeypatch.setattr(pods, "ACTIVITY_S", 0.01)
    async with open_service("generator", config, "generator-0") as service:
        pod = GeneratorPod(service)
        noting = asyncio.create_task(pod._note_activity(Loop("activity", pod._note_activity, 60.0)))

        def shown(name: str) -> float:
            service.metrics.show(True, (), {}, service.activity)
            return service.registry.get_sample_value("grpo_pod_activity_seconds_total", {"activity": name}) or 0.0

        await wait_until(lambda: shown("loading") > activity.process_age_s() - 1)
        assert shown("idle") == 0.0
        pod._loaded.set()
        service.say(paused=True)
        await wait_until(lambda: shown("paused") > 0.1)
        service.say(paused=False)
        await wait_until(lambda: shown("syncing") > 0.0)  # it has no weights yet
        await end_tasks([noting])
        assert sum(map(shown, activity.ACTIVITIES)) == pytest.approx(sum(service.activity.spent().values()), abs=0.5)
        await pod.verifiers.close()
        await pod.engine.close()
