"""Run `pytest` with the given arguments and record its duration and processor time: `python -m tests.suite ARGUMENTS`.

Writes `build/suite_seconds.json`, which `python -m tests.house` reads, only if all tests pass.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

RECORD = Path(__file__).parent.parent / "build" / "suite_seconds.json"


def main(arguments: list[str]) -> int:
    """Run the tests; return pytest's exit code."""
    begun = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code == 0:
        RECORD.parent.mkdir(exist_ok=True)
        figures = {"suite_s": round(time.monotonic() - begun), "suite_cpu_s": round(used.ru_utime + used.ru_stime)}
        RECORD.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
