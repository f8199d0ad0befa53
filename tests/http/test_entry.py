"""SIGTERM immediately ends a process that is still starting, with a message; a running service handles it itself.

A service that has finished its work keeps its exit code. A service waits for a Redis that starts late.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.config import ConfigError, to_toml
from services.console.run.redis_server import RedisServer
from services.environment.pod import EnvironmentPod
from services.generator.pod import GeneratorPod
from services.http.entry import connect, leaving_at_once, open_service
from services.protocol.errors import RedisUnreachable
from services.runtime.exits import EXIT_UNLOADED
from services.store import Store
from services.verifiers.scoring import Scoring
from tests.support.harness import save_tokenizer_folder, small_config
from tests.support.scripted import ScriptedEngine

LOADING = """
import subprocess, sys, time
def load(*_):
    subprocess.Popen(["sleep", "300"])
    print("loading", flush=True)
    while True:
        time.sleep(0.1)  # a signal may reach another thread, which does not interrupt the main thread's sleep
"""
GENERATOR = "from services.generator import __main__ as generator, pod\nfrom tests.support.scripted import ScriptedEngine\n"
PROGRAMS = {
    "entry": "from services.http import entry\nasync def work(_): load()\nsys.exit(entry.main('web', work))",
    "tokenizer": GENERATOR + "pod.load_tokenizer = load\nsys.exit(generator.main('generator', generator.generate))",
    "engine": GENERATOR + "ScriptedEngine.start = load\nsys.exit(generator.main('generator', generator.generate))",
    "environment": "from services.environment import __main__ as environment, pod\n"
    "pod.Scoring.start = load\nsys.exit(environment.main('environment', environment.run))",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_sigterm_ends_a_loading_process_at_once(program: str, server: RedisServer, store: Store, tmp_path: Path) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    save_tokenizer_folder(Path(config.model.path))
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    environ = {**os.environ, "GRPO_CONFIG": str(tmp_path / "resolved.toml")}
    argv = [sys.executable, "-c", LOADING + PROGRAMS[program]]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, env=environ, **streams, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert any(line == b"loading\n" for line in process.stdout)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == EXIT_UNLOADED
            assert process.stdout.read() == b"", "its child processes have exited, too"
            assert process.stderr is not None
            assert b"ended by SIGTERM while starting" in process.stderr.read().splitlines()[-1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


FINALIZING = """
import atexit, os, signal, sys
from services.http import entry
async def work(_):
    pass
atexit.register(print, "over")
atexit.register(os.kill, os.getpid(), signal.SIGTERM)  # as a cluster does after the drain
entry.end_process(entry.main("web", work))
"""


def test_a_signal_after_the_work_keeps_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "resolved.toml").write_text(to_toml(small_config(tmp_path, None)))
    environ = {**os.environ, "GRPO_CONFIG": str(tmp_path / "resolved.toml")}
    done = subprocess.run(
        [sys.executable, "-c", FINALIZING], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "over", "exit handlers have run, and their output is there"


async def test_a_redis_that_starts_late_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis").mkdir()
    late = RedisServer(tmp_path / "redis")
    monkeypatch.setenv("GRPO_REDIS_PASSWORD", late.password)
    config = small_config(tmp_path, None, f"redis.url={late.url}", "run.name=late")
    monkeypatch.setenv("GRPO_START_S", "60")
    connecting = asyncio.create_task(connect("web", config))
    done, _ = await asyncio.wait([connecting], timeout=1.5)
    assert not done, "nothing listens there yet"
    try:
        await asyncio.to_thread(late.start)
        await (await asyncio.wait_for(connecting, 30)).close()
    finally:
        late.kill()


async def test_waiting_for_redis_times_out_with_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, None, "redis.url=redis://127.0.0.1:1/0")
    for seconds in ("", "1.5"):
        monkeypatch.setenv("GRPO_START_S", seconds)
        with pytest.raises(RedisUnreachable, match=r"127\.0\.0\.1:1"):
            await connect("web", config)
    monkeypatch.setenv("GRPO_START_S", "soon")
    with pytest.raises(ConfigError, match="GRPO_START_S = 'soon'"):
        await connect("web", config)


async def test_a_running_service_handles_sigterm_itself(server: RedisServer, store: Store, tmp_path: Path) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    before = signal.getsignal(signal.SIGTERM)
    with leaving_at_once():
        at_once = signal.getsignal(signal.SIGTERM)
        async with open_service("web", config, "web-0") as service:
            os.kill(os.getpid(), signal.SIGTERM)
            await service.stopping.wait()
        assert signal.getsignal(signal.SIGTERM) is at_once is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("kind", "pod", "loaded"), [("generator", GeneratorPod, ScriptedEngine), ("environment", EnvironmentPod, Scoring)]
)
async def test_a_pod_terminated_early_loads_nothing(
    kind: str, pod: Any, loaded: Any, server: RedisServer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    save_tokenizer_folder(Path(config.model.path))
    started: list[object] = []

    async def start(*given: object) -> None:
        started.append(given)

    monkeypatch.setattr(loaded, "start", start)
    async with open_service(kind, config, f"{kind}-0") as service:
        one = pod(service)
        service.stop()
        await one.run()
    assert not started
