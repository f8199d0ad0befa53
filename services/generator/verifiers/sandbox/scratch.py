"""Scratch folders of verifier workers: one each, gone with its worker, or with the next pool of this machine.

Guarantees: a folder whose owner lives is never swept, in whatever container it lives, as the owner holds a lock on it that the
kernel lets go when it dies; nothing is swept that is another user's, or is not a folder.
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
YOUNG_S = 60.0  # a folder may have been made and not be locked yet


class Scratch:
    """A folder that lasts as long as this process, or until `remove`."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Delete it, and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep() -> int:
    """Delete the folders whose owners ended without it, by kill -9 or with their machine; how many there were."""
    swept = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, another user's, locked
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
