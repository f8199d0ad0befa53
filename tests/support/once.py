"""Things created once for all of pytest-xdist's workers."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def once(places: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield a folder and whether this worker must fill it, while the others wait. If it fails, the next worker must."""
    base = places.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / f"shared-{name}", shared / f"shared-{name}.done"
    folder.mkdir(exist_ok=True)
    with (shared / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, not done.exists()
        done.touch()
