"""A Redis server is stopped, whatever it is doing."""

from __future__ import annotations

import os
import signal

import pytest

from services.console.run.redis_server import RedisServer, start_server
from services.protocol.errors import StoreError
from services.runtime import redis_process
from tests.conftest import Path, skip_without


def test_a_server_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("redis-server")
    monkeypatch.setattr(redis_process, "END_LIMIT_S", 0.2)
    server = RedisServer(tmp_path)
    server.start()
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert not server.alive


@pytest.mark.parametrize("name", ["a space", "it's", 'a "quote"', r"back\slash"])
def test_a_server_starts_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    server = start_server(tmp_path / name / "redis", "small")
    try:
        assert (tmp_path / name / "redis" / "appendonlydir").is_dir()
    finally:
        server.stop()


def test_a_server_whose_port_is_taken_is_ended(tmp_path: Path) -> None:
    first = start_server(tmp_path / "first", "small")
    second = RedisServer(tmp_path / "second", port=first.port)
    try:
        with pytest.raises(StoreError, match="in use by another Redis server"):
            second.start()
        assert not second.alive
    finally:
        first.stop()
