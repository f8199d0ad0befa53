"""Child processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import signal
import socket

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """For `preexec_fn`: ask the kernel for a SIGTERM when the parent dies, however it dies. Linux only, a no-op elsewhere."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on at the moment of the call."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
