"""A run with a missing model: every service exits with code 2 and one line that says what to correct."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.config import to_toml
from services.console.run.redis_server import RedisServer
from services.runtime.process_tools import free_port
from services.store import Store
from tests.support.harness import small_config

pytestmark = pytest.mark.slow

PROGRAMS = ("services.dataprep", "services.generator", "services.trainer.node")
PATHS = {
    "/srv/grpo/models/absent": ("is not a folder (at /srv/grpo/models/absent)", "correct the path"),
    "owner/absent": (
        "couldn't connect|outgoing traffic has been disabled",
        "correct the path to a folder, or the name (a private or",
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("program", PROGRAMS)
async def test_each_service_names_the_key_the_value_and_the_remedy(
    program: str, path: str, server: RedisServer, store: Store, tmp_path: Path
) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}", f"model.path={path}")
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    environ = {**os.environ, "GRPO_CONFIG": str(tmp_path / "resolved.toml"), "HF_HUB_OFFLINE": "1"}
    environ["MASTER_PORT"] = str(free_port(""))  # DeepSpeed sets this process's port here
    argv = [sys.executable, "-m", program, "--name", "pod-0"]
    done = await asyncio.to_thread(subprocess.run, argv, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 2, done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith('{"event"')]  # without the log
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"error: model.path = {path!r} ")
    for words in PATHS[path]:
        assert any(each in lines[0] for each in words.split("|")), lines
    assert '"level": "error"' not in done.stdout + done.stderr
    assert not await store.fleet.members(config.fleet.ttl_s), "it must leave the fleet"
