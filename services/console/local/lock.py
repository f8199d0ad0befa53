"""A lock that allows one run at a time per run folder.

Guarantees: the lock is held while the console or any service that it started lives, because services inherit it. The kernel
releases it when the last of them exits, for whatever reason. A process that cannot take the lock learns which process holds it.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

POLL_S = 0.1
GLANCE_S = 0.5  # `grpo status` holds the lock briefly; other commands wait this long for it


class InUse(Exception):
    """Another live process uses the run folder; the message names it."""


class FolderLock:
    """The lock `folder/lock`. Use it as a context manager, and pass `fd` to child processes."""

    def __init__(self, folder: Path, patience_s: float = 0.0) -> None:
        """`patience_s`: seconds to wait for the services of a dead console to exit."""
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
        return f"processes left behind by process {owner}, which died: {', '.join(map(str, holders))}"


def _holders(path: Path) -> list[int]:
    """Return the other processes that have the file open. Empty where /proc is not available."""
    wanted, found = os.path.realpath(path), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and any(os.readlink(link) == wanted for link in (entry / "fd").iterdir()):
                found.append(int(entry.name))
        except OSError:  # it has exited, or belongs to another user
            continue
    return sorted(found)
