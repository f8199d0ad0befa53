"""A Redis server is stopped, whatever it is doing."""

from __future__ import annotations

import os
import signal

import pytest

from services.console.local.redis_server import RedisServer
from services.runtime.processes import redis_process
from tests.conftest import Path, skip_without


def test_a_server_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("redis-server")
    monkeypatch.setattr(redis_process, "END_LIMIT_S", 0.2)
    server = RedisServer(tmp_path)
    server.start()
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert not server.alive
