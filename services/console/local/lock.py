"""One run folder, one run at a time.

Guarantees: the lock is held as long as the console or any service it started lives, because services inherit it; the
kernel gives it back when the last of them dies, however it dies. A second taker learns who holds it.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

POLL_S = 0.1
GLANCE_S = 0.5  # `grpo status` holds the lock for an instant; who wants it for longer waits that out


class InUse(Exception):
    """Another live process uses the run folder; the message names it."""


class FolderLock:
    """The lock `folder/lock`. Use as a context manager; `fd` is to be passed to child processes."""

    def __init__(self, folder: Path, patience_s: float = 0.0) -> None:
        """`patience_s`: how long to wait for services of a console that has died to come to their end."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / "lock"
        self._patience_s = patience_s

    def __enter__(self) -> FolderLock:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        started = time.monotonic()
        while not self._take():
            if time.monotonic() - started > (GLANCE_S if self._owner_lives() else self._patience_s):
                message = f"{self.folder} is in use by {self._users()}"
                os.close(self.fd)
                raise InUse(message)
            time.sleep(POLL_S)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.fd)

    def _take(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _owner(self) -> int:
        text = os.pread(self.fd, 20, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else 0

    def _owner_lives(self) -> bool:
        owner = self._owner()
        return owner in (0, os.getpid(), *_holders(self.path))

    def _users(self) -> str:
        owner, holders = self._owner(), _holders(self.path)
        if self._owner_lives() or not holders:
            return f"process {owner or 'unknown'}"
        return f"services of process {owner}, which has died: process {', '.join(map(str, holders))}; end them first"


def _holders(path: Path) -> list[int]:
    """Processes that have the file open, this one left out. Empty where /proc does not tell."""
    wanted, found = os.path.realpath(path), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and any(os.readlink(link) == wanted for link in (entry / "fd").iterdir()):
                found.append(int(entry.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return sorted(found)
