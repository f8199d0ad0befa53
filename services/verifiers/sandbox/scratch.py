"""Scratch folders of verifier workers: one each, deleted with its worker, or by the next pool on this machine.

Guarantees: a folder whose owner is alive is never deleted, even from another container, since the owner holds a lock on it that
the kernel releases when it dies. Nothing is deleted that belongs to another user or is not a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "grpo-verifier-"
YOUNG_S = 60.0  # a younger folder may not be locked yet


class Scratch:
    """A folder that exists as long as this process, or until `remove`."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Delete the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep() -> int:
    """Delete the folders whose owners ended without doing so, e.g. by kill -9 or power loss; return how many."""
    swept = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # deleted meanwhile, another user's, or locked
            swept += _sweep(path)
    return swept


def _sweep(path: Path) -> bool:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        known = os.fstat(folder)
        if known.st_uid != os.getuid() or time.time() - known.st_mtime < YOUNG_S:
            return False
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
        return True
    finally:
        os.close(folder)
