"""Print the learning curve of a run: mean rewards of ten steps each, and the last ten steps minus the first.

python -m examples.tools.curve runs/tools
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

AT_A_TIME = 10  # steps
WIDTH = 40  # characters of a bar


def rewards(run: Path) -> list[float]:
    """Return the mean reward of each step of the run in a folder."""
    return [json.loads(line)["reward/train/mean"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def learned(curve: Sequence[float]) -> float:
    """Return the mean reward of the last ten steps minus that of the first ten."""
    return _mean(curve[-AT_A_TIME:]) - _mean(curve[:AT_A_TIME])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the curve of the run whose folder is the only argument. Return the exit status."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    curve = rewards(Path(folder))
    for start in range(0, len(curve), AT_A_TIME):
        mean = _mean(curve[start : start + AT_A_TIME])
        last = min(start + AT_A_TIME, len(curve)) - 1
        print(f"steps {start:3d} to {last:3d}  reward {mean:.3f}  {'█' * round(WIDTH * mean)}")
    print(f"learned: {learned(curve):+.3f} (last ten steps minus the first ten)")
    return 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
