"""SIGTERM to a process that has begun nothing yet: it ends there and then, and says so; a service that is open decides itself.

One that has done its work keeps its exit code. A Redis that comes late is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.config import ConfigError, to_toml
from services.console.local.redis_server import RedisServer
from services.generator.pod import GeneratorPod
from services.protocol.errors import RedisUnreachable
from services.runtime.entry import EXIT_UNLOADED, connect, leaving_at_once, open_service
from services.store import Store
from tests.support.harness import save_tokenizer_folder, small_config
from tests.support.scripted import ScriptedEngine

LOADING = """
import subprocess, sys, time
def load(*_):
    subprocess.Popen(["sleep", "300"])
    print("loading", flush=True)
    while True:
        time.sleep(0.1)  # a signal may reach another thread, and does not end the main thread's sleep then
"""
GENERATOR = "from services.generator import __main__ as generator, pod\nfrom tests.support.scripted import ScriptedEngine\n"
PROGRAMS = {
    "entry": "from services.runtime import entry\nasync def work(_): load()\nsys.exit(entry.main('web', work))",
    "tokenizer": GENERATOR + "pod.load_tokenizer = load\nsys.exit(generator.main('generator', generator.generate))",
    "engine": GENERATOR + "ScriptedEngine.start = load\nsys.exit(generator.main('generator', generator.generate))",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_ends_at_once_while_it_loads(program: str, server: RedisServer, store: Store, tmp_path: Path) -> None:
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
            assert process.stdout.read() == b"", "what it had started has ended too"
            assert process.stderr is not None
            assert b"ended by SIGTERM while starting" in process.stderr.read().splitlines()[-1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


FINALIZING = """
import atexit, os, signal, sys
from services.runtime import entry
async def work(_):
    pass
atexit.register(print, "over")
atexit.register(os.kill, os.getpid(), signal.SIGTERM)  # as a cluster does once the drain is over
entry.end_process(entry.main("web", work))
"""


def test_a_signal_after_the_work_is_done_does_not_change_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "resolved.toml").write_text(to_toml(small_config(tmp_path, None)))
    environ = {**os.environ, "GRPO_CONFIG": str(tmp_path / "resolved.toml")}
    done = subprocess.run(
        [sys.executable, "-c", FINALIZING], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "over", "what is registered for the end has run, and what it printed is there"


async def test_a_redis_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis").mkdir()
    late = RedisServer(tmp_path / "redis")
    monkeypatch.setenv("GRPO_REDIS_PASSWORD", late.password)
    config = small_config(tmp_path, None, f"redis.url={late.url}", "run.name=late")
    monkeypatch.setenv("GRPO_START_S", "60")
    connecting = asyncio.create_task(connect("web", config))
    done, _ = await asyncio.wait([connecting], timeout=1.5)
    assert not done, "nobody listens there yet"
    try:
        await asyncio.to_thread(late.start)
        await (await asyncio.wait_for(connecting, 30)).close()
    finally:
        late.kill()


async def test_a_redis_that_does_not_come_ends_the_wait_with_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, None, "redis.url=redis://127.0.0.1:1/0")
    for seconds in ("", "1.5"):
        monkeypatch.setenv("GRPO_START_S", seconds)
        with pytest.raises(RedisUnreachable, match=r"127\.0\.0\.1:1"):
            await connect("web", config)
    monkeypatch.setenv("GRPO_START_S", "soon")
    with pytest.raises(ConfigError, match="GRPO_START_S = 'soon'"):
        await connect("web", config)


async def test_a_service_has_the_say_while_it_is_open(server: RedisServer, store: Store, tmp_path: Path) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    before = signal.getsignal(signal.SIGTERM)
    with leaving_at_once():
        at_once = signal.getsignal(signal.SIGTERM)
        async with open_service("web", config, "web-0") as service:
            os.kill(os.getpid(), signal.SIGTERM)
            await service.stopping.wait()
        assert signal.getsignal(signal.SIGTERM) is at_once is not before
    assert signal.getsignal(signal.SIGTERM) is before


async def test_a_generator_that_was_told_to_end_before_loads_nothing(
    server: RedisServer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    save_tokenizer_folder(Path(config.model.path))
    started: list[object] = []

    async def start(_: ScriptedEngine, config: object) -> None:
        started.append(config)

    monkeypatch.setattr(ScriptedEngine, "start", start)
    async with open_service("generator", config, "generator-0") as service:
        pod = GeneratorPod(service)
        service.stop()
        await pod.run()
    assert not started
