"""Tracks the readers of a stopped run: they share a lock on a file, which the keeper of their server takes when none is left.

Guarantees: the kernel releases a process's locks when it exits, for whatever reason, so no dead reader is counted. A reader
that arrives while the server shuts down waits until it is down.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_LOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process


class Presence:
    """The file `folder/readers`, open. Close it to leave.

    Its locks belong to the open file and not to the process (F_OFD_SETLK of fcntl(2)), so a process may hold several.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "readers", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def join(self) -> bool:
        """Become a reader. Return whether that succeeded: not while the keeper shuts down."""
        return self._lock(fcntl.F_RDLCK)

    def leave(self) -> bool:
        """Stop being a reader. Return whether no other reader is left."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK))
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK))
        return struct.unpack(_LOCK, found)[0] != fcntl.F_RDLCK

    def take(self) -> bool:
        """Lock the file exclusively, as the keeper. Return whether that succeeded, that is, whether there are no readers."""
        return self._lock(fcntl.F_WRLCK)

    def close(self) -> None:
        """Release everything."""
        os.close(self._fd)

    def _lock(self, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _request(kind))
        except BlockingIOError:
            return False
        return True


def _request(kind: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, 0, 0, 0)
