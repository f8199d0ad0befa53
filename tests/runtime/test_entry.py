"""SIGTERM to a process that has begun nothing yet: it ends there and then; a service that is open decides itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.config import to_toml
from services.console.local.redis_server import RedisServer
from services.generator.pod import GeneratorPod
from services.runtime.entry import leaving_at_once, open_service
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
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert any(line == b"loading\n" for line in process.stdout)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert process.stdout.read() == b"", "what it had started has ended too"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


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
