"""A lock that allows one run at a time per run folder, or one server for readers of a stopped run.

Guarantees: the lock is held while the console or any service that it started lives, because services inherit it. The kernel
releases it when the last of them exits, for whatever reason. A process that cannot take the lock learns which process holds it.
A run takes it from readers, and from services of a dead console that do not exit in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

POLL_S = 0.1
GLANCE_S = 0.5  # a command that checks the lock takes it for an instant
YIELD_S = 30.0  # for the server of readers to shut down when a run starts
TOLD_S = 1.0  # a longer wait is reported
KILLED_S = 10.0  # for killed processes to be gone
READERS = "readers"


@dataclass(frozen=True)
class LockHolder:
    """Who holds a run folder: the console of a run and its services or, if `readers`, a server for readers."""

    pid: int
    """Process ID of the console or of the command that serves readers; 0: it has not written it yet."""
    lives: bool
    """Whether that process lives. If not, services that it started are still exiting."""
    readers: bool = False
    port: int = 0
    """Port of the readers' server; 0: it is starting."""


class InUse(Exception):
    """Another live process uses the run folder; the message names it."""


class FolderLock:
    """The lock `folder/lock`. Use it as a context manager, and pass `fd` to child processes."""

    def __init__(
        self, folder: Path, patience_s: float = 0.0, *, readers: bool = False, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """`patience_s`: seconds to wait for the services of a dead console to exit, before they are killed; 0: do neither.
        `readers`: take it for a server of readers; otherwise such a server is asked to give way. `say` receives what is waited
        for.
        """
        self.folder = folder
        self.path = folder / "lock"
        self._patience_s, self._readers, self._say = patience_s, readers, say

    def __enter__(self) -> FolderLock:
        self.open()
        started, told, killed = time.monotonic(), False, False
        while not self.take():
            found = holder(self.folder) or LockHolder(0, True)
            waited_s, limit_s = time.monotonic() - started, KILLED_S if killed else self._limit_s(found)
            if found.readers and not self._readers and not told:
                _send(signal.SIGUSR1, [found.pid] if found.lives and found.pid else [])  # own_server.py: shut the server down
            if waited_s > limit_s and self._patience_s and not killed and not found.lives and not found.readers:
                started, killed = time.monotonic(), self._kill_left(found, limit_s)
                continue
            if waited_s > limit_s:
                os.close(self.fd)
                raise InUse(f"{self.folder} is in use by {users(self.folder, found)}")
            if waited_s > TOLD_S and not told:
                self._say(f"waiting up to {limit_s:g} s for {users(self.folder, found)} to exit")
            told = told or found.readers or waited_s > TOLD_S
            time.sleep(POLL_S)
        self.note()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and [entry.name for entry in self.folder.iterdir()] == [self.path.name]:  # nothing was started
            self.path.unlink()
            self.folder.rmdir()
        os.close(self.fd)

    def note(self, port: int = 0) -> None:
        """Write who holds the lock and, for a server of readers, its port once it responds."""
        words = [str(os.getpid()), *([READERS, str(port)] if self._readers else [])]
        line = f"{' '.join(words)}\n".encode()
        os.pwrite(self.fd, line, 0)
        os.ftruncate(self.fd, len(line))

    def _limit_s(self, found: LockHolder) -> float:
        if found.readers:
            return GLANCE_S if self._readers else YIELD_S
        return GLANCE_S if found.lives else self._patience_s

    def _kill_left(self, found: LockHolder, waited_s: float) -> bool:
        """Kill processes that a dead console left behind. Returns False if the lock has changed hands meanwhile."""
        left = holders(self.path)
        time.sleep(POLL_S)  # whoever takes the lock now says so within that time
        if holder(self.folder) != found:
            return False
        self._say(f"killing {users(self.folder, found)}: still there after {waited_s:g} s")
        _send(signal.SIGKILL, left)  # nothing is lost: services are built to be killed at any time
        return True

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def take(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if os.fstat(self.fd).st_nlink:
            return True
        os.close(self.fd)  # a refused start has deleted it
        self.open()
        return False


def holder(folder: Path) -> LockHolder | None:
    """Return the holder of a run folder; None: there is none, or the folder does not exist."""
    path = folder / "lock"
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        line, _, _ = os.pread(lock, 100, 0).partition(b"\n")  # the rest is of a longer line that is being replaced
        words = line.decode(errors="replace").split()
    else:
        return None
    finally:
        os.close(lock)
    pid = int(words[0]) if words and words[0].isdigit() else 0
    readers = words[1:2] == [READERS]
    return LockHolder(pid, pid in (0, os.getpid()) or _has_open(pid, path), readers, int(words[2]) if readers else 0)


def _send(sig: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to processes, which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, sig)


def users(folder: Path, found: LockHolder) -> str:
    """Describe who uses a run folder."""
    if found.readers:
        return f"the server of its readers (process {found.pid})"
    left = [] if found.lives else holders(folder / "lock")
    if not left:
        return f"process {found.pid or 'unknown'}"
    return f"process {', '.join(map(str, left))} (left behind when process {found.pid} died)"


def holders(path: Path) -> list[int]:
    """Return the other processes that share the lock, without those that wait for it. Empty where /proc is not available."""
    found = [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _has_open(int(entry.name), path, locked=True)]
    return sorted(pid for pid in found if pid != os.getpid())


def _has_open(pid: int, path: Path, locked: bool = False) -> bool:
    """Return whether a process has the file open and, with `locked`, by a descriptor that has the lock.

    False if it has exited, or belongs to another user.
    """
    wanted, proc = os.path.realpath(path), Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        for link in (proc / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has just been closed
                if os.readlink(link) == wanted and (not locked or "\nlock:" in (proc / "fdinfo" / link.name).read_text()):
                    return True
    return False
