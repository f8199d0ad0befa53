"""Run one stage: `python -m tests.gpu.stage MODULE:FUNCTION LIMIT_S FOLDER [--dry]`. The last line of standard output is its
figures, as JSON.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path

from tests.gpu.bench import Bench

LAST_S = 5.0  # before the limit, the stack of every thread is printed, to show what a stage is waiting for


def main() -> None:
    """Run the stage."""
    function, limit_s, folder, *flags = sys.argv[1:]
    faulthandler.dump_traceback_later(float(limit_s) - LAST_S)
    module, _, name = function.partition(":")
    bench = Bench(Path(folder), "--dry" in flags)
    figures = getattr(importlib.import_module(module), name)(bench)
    print(json.dumps({**figures, "gpu": bench.gpu}), flush=True)
    sys.stderr.flush()
    os._exit(0)  # NCCL groups and compilers may block the exit of a process, which would cost its figures


if __name__ == "__main__":
    main()
