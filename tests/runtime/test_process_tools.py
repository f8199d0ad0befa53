"""A free port stays reserved until its server has started; the number of processors is that of the container."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from services.runtime import process_tools
from services.runtime.process_tools import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_free_port_is_reserved_for_its_server(host: str) -> None:
    ports = {free_port(host) for _ in range(50)}
    assert len(ports) == 50
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            other = stack.enter_context(socket.socket())
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] not in ports
    for port in ports:
        with socket.create_server((host, port)) as server:
            assert server.getsockname()[1] == port


def test_a_containers_limit_of_processors_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(process_tools, "CPU_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert process_tools.processors() == 8, "there is no limit"
    limits = {"max 100000": 8, "200000 100000": 2, "150000 100000": 2, "1000 100000": 1, "6400000 100000": 8}
    for limit, expected in limits.items():
        quota.write_text(limit + "\n")
        assert process_tools.processors() == expected, limit
