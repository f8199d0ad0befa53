"""What processes of a run share: the variable that names their configuration, processors, free ports, the death of a parent."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
from pathlib import Path

CONFIG_ENV = "GRPO_CONFIG"
"""Variable with the path of the configuration of the run that a process belongs to."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The limit of the container: microseconds of processor time, or `max`, and the period for which they are granted."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel, as a `preexec_fn`, for a SIGTERM when the parent dies, however it dies. Does nothing outside Linux."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free at the moment of the call, for a server that sets SO_REUSEADDR, as servers do.

    For a minute the kernel does not assign it to a process that requests any port, since it has a connection in TIME_WAIT: the
    intended server may take seconds to start.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        probe.listen()
        port = probe.getsockname()[1]
        with socket.create_connection((host or "127.0.0.1", port)) as caller:
            while True:  # a client of the port's previous owner may connect
                answered, peer = probe.accept()
                answered.close()  # the side that closes first keeps the port in TIME_WAIT
                if peer == caller.getsockname():
                    break
            caller.recv(1)
        return port


def processors() -> int:
    """Return the number of processors: those that this process may run on, or fewer if its container's limit is lower."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # not there, or `max`
        granted, period = map(int, CPU_QUOTA.read_text().split())
        return max(1, min(allowed, math.ceil(granted / period)))
    return allowed
