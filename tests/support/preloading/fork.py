"""A fork whose child becomes a sibling: a child of the caller's parent, which waits for it and is notified of its exit.

Linux on x86-64 only (`SUPPORTED`). The caller has a single thread, so no other thread can hold a lock.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000  # linux/sched.h
PR_SET_PDEATHSIG, PR_GET_TID_ADDRESS = 1, 40  # linux/prctl.h
SYS_CLONE = 56

_libc = ctypes.PyDLL(None, use_errno=True)  # holds the GIL, which must not be released during a fork
_libc.syscall.restype = ctypes.c_long


def fork_brother() -> int:
    """Fork like `os.fork`, but with the caller's parent as the child's parent. The handlers of `pthread_atfork` do not run."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads run; the child would have one"
    noted = ctypes.c_void_p()  # where the C library stores the id of this thread
    if _libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(noted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not say where the thread's number is kept")
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID | signal.SIGCHLD
    nothing, python = ctypes.c_void_p(), ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = _libc.syscall(ctypes.c_long(SYS_CLONE), ctypes.c_ulong(flags), nothing, nothing, noted, nothing)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone failed")
    return pid


def die_with_parent() -> None:
    """Ask the kernel for a SIGKILL when the parent dies."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
