"""Cases that describe a procedure: each has a test of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NODES: dict[str, str] = {
    "stop-01": "",
    "stop-02": "",
    "own-01": "",
    "own-02": "",
    "own-03": "",
    "cfg-01": "",
    "cfg-02": "",
    "cfg-03": "",
    "net-01": "",
    "net-02": "",
    "door-90": "",
    "wb-01": "",
}
"""Id of a case -> the test that carries it out, as pytest names it; empty: there is none yet."""
ROOT = Path(__file__).parents[2]


def attempt(name: str) -> tuple[str, bool]:
    """Run the test of a case; return the last line of its report, and whether it passed."""
    if not NODES[name]:
        return "not tried: there is no test of it yet", False
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:xdist", NODES[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1], done.returncode == 0
