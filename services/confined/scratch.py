"""Scratch folders of verifier workers: one each, deleted with its worker, or by the next pool on this machine.

Guarantees: a folder whose owner is alive is never deleted, even from another container, since the owner holds a lock on it that
the kernel releases when it dies. Nothing is deleted that belongs to another user or is not a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import tempfile
import time
from pathlib import Path

PREFIX = "grpo-verifier-"
YOUNG_S = 60.0  # a younger folder may not be locked yet


class Scratch:
    """A folder that exists as long as this process, or until `remove`."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            self._lock = _locked(self.path)
        except OSError:  # e.g. too many open files
            self.path.rmdir()
            raise

    def remove(self) -> None:
        """Delete the folder and its contents."""
        with contextlib.suppress(OSError):
            remove(self.path)
        os.close(self._lock)


def sweep() -> int:
    """Delete the folders whose owners ended without doing so, e.g. by kill -9 or power loss; return how many."""
    swept = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # deleted meanwhile, another user's, or locked
            swept += _sweep(path)
    return swept


def remove(folder: Path) -> None:
    """Delete a folder, whatever its depth and modes; no symbolic link is followed.

    Each folder in it is first moved up, so that no path becomes too long.
    """
    numbers = itertools.count()
    with contextlib.suppress(FileNotFoundError):
        os.chmod(folder, 0o700)
        while entries := list(os.scandir(folder)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        os.rename(inner.path, folder / f".{os.getpid()}.{next(numbers)}.gone")
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
        os.rmdir(folder)


def _locked(folder: Path) -> int:
    """Return a descriptor of a folder that holds the lock on it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(path: Path) -> bool:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        known = os.fstat(folder)
        if known.st_uid != os.getuid() or time.time() - known.st_mtime < YOUNG_S:
            return False
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(path)
        return True
    finally:
        os.close(folder)
