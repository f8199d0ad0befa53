"""Run one stage: `python -m tests.gpu.stage NAME FOLDER [--dry]`. The last line of standard output is its figures, as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from tests.gpu.bench import Bench
from tests.gpu.stages import STAGES


def main() -> None:
    """Run the stage."""
    name, folder, *flags = sys.argv[1:]
    [stage] = [stage for stage in STAGES if stage.name == name]
    module, function = stage.function.split(":")
    figures = getattr(importlib.import_module(module), function)(Bench(Path(folder), "--dry" in flags))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
