"""Runs Python code from standard input, confined: without network, further processes or threads, and files but its own folder's.

Guarantees: the code sees Python's own libraries and the folder that it starts in, and nothing else of the machine; it outlives
neither the process that started it nor its limits. If the kernel cannot confine it, it is not run.

Run as `python -I -B runner.py ROOT PARENT MEMORY_BYTES CPU_S`, in the folder that it may write to. It writes `CONFINED` before it
runs the code, which cannot take that back. Exit status 3 without it: not confined.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import sysconfig
from pathlib import Path

UNCONFINED = 3
CONFINED = b"\0"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DATA = ("/lib", "/lib64", "/usr/lib", "/usr/share/zoneinfo", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom")


def main() -> None:
    """Run the code on standard input, and print the value of its last expression."""
    root, parent, memory_bytes, cpu_s = sys.argv[1], *map(int, sys.argv[2:5])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    sys.path.insert(0, root)
    from services.confined.confine import confine_alone
    from services.confined.script import run

    sys.path.remove(root)
    code = sys.stdin.buffer.read().decode(errors="replace")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    readable = [Path(place) for place in (*libraries, *DATA) if Path(place).exists()]
    if not confine_alone(Path.cwd(), readable, memory_bytes, cpu_s):
        sys.exit(UNCONFINED)
    os.write(1, CONFINED)
    del sys.argv[1:]
    run(code)


if __name__ == "__main__":
    main()
