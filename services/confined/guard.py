"""Runs a command so that nothing that it starts outlives it, or the process that started this one.

Guarantees: when the command ends, when this process gets SIGTERM, and when its parent dies, however it dies, every process that
descends from the command is killed, whichever session or process group it is in. Its exit status is the command's.

Run as `python -I -S guard.py PARENT COMMAND…`; it imports nothing but the standard library, since there is one for each worker.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_STATE, _PARENT = 0, 1  # of /proc/PID/stat, after the name


def guarded() -> list[str]:
    """Return the prefix that makes a command of this process run under a guard."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def main() -> int:
    """Run the command of the arguments to its end and return its exit status."""
    libc = ctypes.CDLL(None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a process that ignores it does not learn how its children ended
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    if os.getppid() != int(sys.argv[1]):
        return 1
    command = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ, setsigmask=())
    _close_inherited()
    status = 1
    while True:
        got = signal.sigwait({signal.SIGTERM, signal.SIGCHLD})
        ended = dict(_ended())
        if command in ended or got == signal.SIGTERM:
            status = ended.get(command, status)
            break
    kill_descendants()
    return status


def kill_descendants() -> None:
    """Kill and reap all descendants of this process, which is a subreaper: children of killed ones become its own.

    Those that it may not kill, because they run as another user (setuid), are left when there are no others.
    """
    while True:
        listed = _children()
        killed = [child for child in listed if _kill(child)]
        if listed and not killed:
            return
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:  # all that have ended: there may be a thousand
                pass
        except ChildProcessError:
            return


def _kill(child: int) -> bool:
    """Kill a child that has not been reaped. Return False if it runs as another user."""
    try:
        os.kill(child, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def _ended() -> list[tuple[int, int]]:
    """Reap the children that have ended; return their process ids and exit statuses."""
    found: list[tuple[int, int]] = []
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((ended[0], os.waitstatus_to_exitcode(ended[1]) & 0xFF))
    except ChildProcessError:
        pass
    return found


def _children() -> list[int]:
    """Return the children of this process, which has one thread; also of those that have ended.

    One that forks and exits again and again is gone before a scan of all processes has reached it, but not before the list of
    the kernel is read.
    """
    try:
        with open("/proc/thread-self/children") as file:
            return list(map(int, file.read().split()))
    except OSError:  # a kernel without this list
        return _scanned()


def _scanned() -> list[int]:
    """Return the children of this process that have not ended, found among all processes."""
    own, found = str(os.getpid()), list[int]()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", errors="replace") as file:
                    fields = file.read().rpartition(") ")[2].split()
            except OSError:  # it is gone
                continue
            if fields[_PARENT] == own and fields[_STATE] != "Z":
                found.append(int(entry))
    return found


def _close_inherited() -> None:
    """Close the command's descriptors, so that the other end notices when the command exits."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


if __name__ == "__main__":
    sys.exit(main())
