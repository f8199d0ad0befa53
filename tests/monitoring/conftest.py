"""A fixture for Prometheus's own checks, if promtool is installed."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(scope="session")
def promtool() -> str:
    """Return the promtool command, which `make test` installs if possible."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return found
