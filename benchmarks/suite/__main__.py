"""All benchmarks as one suite: measure, record, compare.

    python -m benchmarks.suite run              # everything in the catalogue; `make bench`
    python -m benchmarks.suite run datapath sync
    python -m benchmarks.suite check            # measures again, and compares ratios with the last record; `make bench-check`
    python -m benchmarks.suite page             # writes docs/benchmarks.md from the last record of each
    python -m benchmarks.suite plan             # prints how long each takes

`run` writes the page and benchmarks/results/DATE.json, one file per day, in which later figures replace earlier ones. `check`
writes nothing, and exits with 1 if a ratio is worse than the whole recorded spread and by more than its tolerance (catalogue.py);
absolute times are never compared. A benchmark that fails, does not report what the catalogue names, or has no record to be
compared with is reported and does not stop the others.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.suite.catalogue import BUDGET_S, SUITE, Benchmark, Figure
from benchmarks.suite.page import write_page

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LATE = 3
"""Multiple of its planned seconds after which a benchmark is stopped; it leaves time for a busy machine and an installation."""

Result = dict[str, Any]


def measure(benchmark: Benchmark) -> Result:
    """Run a benchmark; return its last line. Raises `RuntimeError` with the end of its output if that or a figure is missing."""
    limit_s = LATE * benchmark.planned_s
    try:
        done = subprocess.run(
            [sys.executable, *benchmark.command], cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took longer than {limit_s} s; {benchmark.planned_s} s were planned") from None
    try:
        if done.returncode:
            raise ValueError
        result = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        output = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"exit code {done.returncode}: {output[-1] if output else 'no output'}") from None
    if lacking := [name.key for name in benchmark.figures if name.key not in result and name.key not in result.get("missed", ())]:
        raise RuntimeError(f"it does not report {lacking[0]}, which the catalogue names")
    return result


def recorded(folder: Path = RESULTS) -> dict[str, Result]:
    """Return the last record of every benchmark, with the day as `date`."""
    found: dict[str, Result] = {}
    for path in sorted(folder.glob("*.json")):
        found |= {name: {**result, "date": path.stem} for name, result in json.loads(path.read_text()).items()}
    return found


def record(results: Mapping[str, Result], folder: Path = RESULTS) -> Path:
    """Add results to today's file; return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{datetime.datetime.now(datetime.UTC).date().isoformat()}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | dict(results), indent=1) + "\n")
    return path


def worse(figure: Figure, before: Result, now: Result) -> str:
    """Return a complaint about a ratio that got worse; empty if it did not."""
    if not figure.ratio or figure.key not in before:
        return ""
    if figure.key not in now:
        return f"{figure.key} is missing, it was {before[figure.key]}"
    was, value, (low, high) = before[figure.key], now[figure.key], before["spread"][figure.key]
    limit = min(low, was * (1 - figure.tolerance)) if figure.better == "higher" else max(high, was * (1 + figure.tolerance))
    bad = value < limit if figure.better == "higher" else value > limit
    return f"{figure.key} is {value}, it was {was} ({low} to {high}, {before['date']})" if bad else ""


def chosen(names: Iterable[str]) -> list[Benchmark]:
    """Return the named benchmarks, or all. Raises SystemExit for an unknown name."""
    wanted, known = set(names), {benchmark.name for benchmark in SUITE}
    if unknown := wanted - known:
        raise SystemExit(f"no benchmark is called {sorted(unknown)[0]!r}: choose from {', '.join(sorted(known))}")
    return [benchmark for benchmark in SUITE if not wanted or benchmark.name in wanted]


def compared(benchmark: Benchmark, before: Mapping[str, Result], now: Result) -> list[str]:
    """Return the complaints about a benchmark that was measured again."""
    if benchmark.name not in before:
        return [f"there is no record to compare with: run python -m benchmarks.suite run {benchmark.name}"]
    return [complaint for figure in benchmark.figures if (complaint := worse(figure, before[benchmark.name], now))]


def plan(benchmarks: Iterable[Benchmark]) -> None:
    """Print the planned time of each and of all."""
    total = 0
    for benchmark in benchmarks:
        total += benchmark.planned_s
        print(f"{benchmark.name:12} {benchmark.planned_s:5} s  python {' '.join(benchmark.command)}")
    print(f"{'total':12} {total:5} s of {BUDGET_S}", flush=True)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=("run", "check", "page", "plan"))
    parser.add_argument("names", nargs="*", help="benchmarks; default: all")
    options = parser.parse_args()
    benchmarks = chosen(options.names)
    if options.verb != "page":
        plan(benchmarks)
    before, complaints = recorded(), []
    for benchmark in benchmarks if options.verb in ("run", "check") else ():
        started = time.monotonic()
        try:
            result = measure(benchmark)
        except RuntimeError as error:
            complaints.append(f"{benchmark.name}: {error}")
            print(complaints[-1], flush=True)
            continue
        result["seconds"] = round(time.monotonic() - started)
        shown = ", ".join(f"{figure.key} {result[figure.key]}" for figure in benchmark.figures if figure.key in result)
        print(f"{benchmark.name} ({result['seconds']} s): {shown}", flush=True)
        if options.verb == "run":
            record({benchmark.name: result})
        else:
            complaints += [f"{benchmark.name}: {what}" for what in compared(benchmark, before, result)]
    if options.verb in ("run", "page"):
        write_page(recorded(), ROOT / "docs" / "benchmarks.md")
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
