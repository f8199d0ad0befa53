"""A free port stays reserved until its server has started."""

from __future__ import annotations

import contextlib
import socket

import pytest

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
