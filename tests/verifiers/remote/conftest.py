"""Fixtures: a service that the tests of a module share, and short retry delays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.verifiers import connection
from tests.verifiers.remote.flaky_server import FlakyServer


@pytest.fixture(scope="module")
def process() -> Iterator[FlakyServer]:
    with FlakyServer() as server:
        yield server


@pytest.fixture
def service(process: FlakyServer, monkeypatch: pytest.MonkeyPatch) -> FlakyServer:
    """Return a running service that responds normally."""
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.02)
    if process.died:
        process.start()
    process.behave()
    return process
