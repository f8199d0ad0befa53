"""The pre-stop hook of a generator pod drains the pod and waits for its exit, or returns at once if there is no work."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from services.config import RunConfig, to_toml
from services.console.run.redis_server import RedisServer
from services.generator.drain import BEYOND_S, drain
from services.http.entry import open_service
from services.runtime.exits import EXIT_UNLOADED
from services.runtime.process_tools import free_port
from services.store import Store
from tests.support.harness import save_tokenizer_folder, small_config, wait_until

DRAIN_S = 60.0


@pytest.fixture
def config(store: Store, server: RedisServer, tmp_path: Path) -> RunConfig:
    own = (f"run.name={store.keys.name}", f"api.port={free_port()}", f"generator.drain_s={DRAIN_S}")
    config = small_config(tmp_path, server, *own)
    save_tokenizer_folder(Path(config.model.path))
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    return config


def program(folder: Path, module: str, *words: str) -> tuple[list[str], dict[str, str]]:
    environ = {**os.environ, "GRPO_CONFIG": str(folder / "resolved.toml"), "GRPO_POD": "generator-0"}
    return [sys.executable, "-m", module, *words], environ


@contextmanager
def pod(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a pod with the scripted engine, as the chart does; yield its process."""
    argv, environ = program(folder, "services.generator", "--stay")
    with subprocess.Popen(argv, env=environ, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def hook(folder: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the hook to completion, where a proxy is set that answers nothing; return the result and its duration."""
    argv, environ = program(folder, "services.generator.drain")
    environ |= dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    began = time.monotonic()
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=DRAIN_S + BEYOND_S + 30, check=False)
    return done, time.monotonic() - began


async def answers(config: RunConfig) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", config.api.port)
    except OSError:
        return False
    writer.close()
    return True


async def test_a_working_pod_has_exited_when_the_hook_returns(config: RunConfig, store: Store, tmp_path: Path) -> None:
    await store.run.create("config", "data", 4, 8)
    with pod(tmp_path) as process:

        async def works() -> bool:
            return any(status.phase == "unsynced" for status in await store.fleet.members(60))

        await wait_until(works)
        done, took_s = await asyncio.to_thread(hook, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert took_s < DRAIN_S, "it ended with the pod, not at its time limit"
        assert await asyncio.to_thread(process.wait, 60) == 0
    assert not await store.fleet.members(60)


async def test_a_pod_of_a_finished_run_is_not_awaited(config: RunConfig, store: Store, tmp_path: Path) -> None:
    await store.run.create("config", "data", 4, 8)
    await store.run.finish("trained 4 of 4 steps")
    with pod(tmp_path) as process:
        await wait_until(lambda: answers(config))
        done, took_s = await asyncio.to_thread(hook, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert took_s < DRAIN_S
        assert process.poll() is None, "SIGTERM ends it"
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) in (0, EXIT_UNLOADED)


async def test_a_loading_pod_is_not_asked_to_drain(config: RunConfig, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def post(_: httpx.Client, path: str, **__: object) -> httpx.Response:
        asked.append(path)
        return httpx.Response(404)

    monkeypatch.setattr(httpx.Client, "post", post)
    async with open_service("generator", config, "generator-0") as service:
        for phase in ("starting", "loading"):
            service.say(phase=phase)
            async with asyncio.timeout(DRAIN_S / 2):
                await asyncio.to_thread(drain, config, service.status.url)
        assert asked == []
        service.say(phase="generating")
        await asyncio.to_thread(drain, config, service.status.url)
    assert asked == ["/v1/drain"]


async def test_an_unresponsive_pod_is_not_awaited(config: RunConfig, tmp_path: Path) -> None:
    done, took_s = await asyncio.to_thread(hook, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert took_s < DRAIN_S
