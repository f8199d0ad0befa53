"""A network of a given speed: the loopback device of a network namespace, shaped by the kernel.

Plain loopback is as fast as the machine copies memory, and takes CPU time from sender and receiver. A network between machines is
slower and costs them less.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests.sync_faults.network import UNSHARE

INSIDE = "GRPO_BENCHMARK_GBIT"
"""Environment variable that holds the speed; set for the process that runs inside."""


def enter(gbit: float) -> None:
    """Rerun this command in its own network, which carries `gbit` Gbit/s (10^9) in all; return if already inside.

    Exits with a message if such a network cannot be created.
    """
    if os.environ.get(INSIDE) == str(gbit):
        return
    shaped = f"ip link set lo up && tc qdisc add dev lo root tbf rate {gbit * 1e9:.0f}bit burst 4mb latency 50ms"
    missing = [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]
    if missing or subprocess.run([*UNSHARE, "sh", "-c", shaped], check=False).returncode:
        sys.exit(f"--gbit needs util-linux and iproute2 (missing: {missing or 'nothing'}), and root or user namespaces")
    again = [sys.executable, *sys.argv]
    os.execvpe(UNSHARE[0], [*UNSHARE, "sh", "-c", f'{shaped} && exec "$@"', "sh", *again], os.environ | {INSIDE: str(gbit)})
