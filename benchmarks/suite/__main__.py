"""All benchmarks as one suite: measure, write down, compare.

    python -m benchmarks.suite run              # all that is in the catalogue; `make bench`
    python -m benchmarks.suite run datapath sync
    python -m benchmarks.suite check            # measures again, and compares ratios with the last record; `make bench-check`
    python -m benchmarks.suite page             # docs/benchmarks.md from the last record of each
    python -m benchmarks.suite plan             # how long each takes

`run` writes benchmarks/results/DATE.json, one file a day, in which later figures take the place of earlier ones, and the page.
`check` writes nothing, and exits with 1 if a ratio is worse than all of the recorded spread and by more than its tolerance
(catalogue.py); absolute times are never compared. A benchmark that fails, that does not report what the catalogue says, or that
has no record to be checked against, is told and does not end the others.
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
"""Times the planned seconds after which a benchmark is ended: a busy machine makes the half of it, an installation the rest."""

Result = dict[str, Any]


def measure(benchmark: Benchmark) -> Result:
    """Its last line. Raises `RuntimeError` with the end of what it said when there is none, or it lacks a figure."""
    limit_s = LATE * benchmark.planned_s
    try:
        done = subprocess.run(
            [sys.executable, *benchmark.command], cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took longer than {limit_s} s, {benchmark.planned_s} s are planned") from None
    try:
        if done.returncode:
            raise ValueError
        result = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"exit code {done.returncode}: {said[-1] if said else 'it said nothing'}") from None
    if lacking := [name.key for name in benchmark.figures if name.key not in result and name.key not in result.get("missed", ())]:
        raise RuntimeError(f"it does not report {lacking[0]}, which the catalogue names")
    return result


def recorded(folder: Path = RESULTS) -> dict[str, Result]:
    """The last record of every benchmark, with the day as `date`."""
    found: dict[str, Result] = {}
    for path in sorted(folder.glob("*.json")):
        found |= {name: {**result, "date": path.stem} for name, result in json.loads(path.read_text()).items()}
    return found


def record(results: Mapping[str, Result], folder: Path = RESULTS) -> Path:
    """Add to today's file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{datetime.datetime.now(datetime.UTC).date().isoformat()}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | dict(results), indent=1) + "\n")
    return path


def worse(figure: Figure, before: Result, now: Result) -> str:
    """What to say of a ratio that got worse; empty: it did not."""
    if not figure.ratio or figure.key not in before:
        return ""
    if figure.key not in now:
        return f"{figure.key} is missing, it was {before[figure.key]}"
    was, value, (low, high) = before[figure.key], now[figure.key], before["spread"][figure.key]
    limit = min(low, was * (1 - figure.tolerance)) if figure.better == "higher" else max(high, was * (1 + figure.tolerance))
    bad = value < limit if figure.better == "higher" else value > limit
    return f"{figure.key} is {value}, it was {was} ({low} to {high}, {before['date']})" if bad else ""


def chosen(names: Iterable[str]) -> list[Benchmark]:
    """Those named, or all. Raises SystemExit for a name that there is not."""
    wanted, known = set(names), {benchmark.name for benchmark in SUITE}
    if unknown := wanted - known:
        raise SystemExit(f"no benchmark is called {sorted(unknown)[0]!r}: there are {', '.join(sorted(known))}")
    return [benchmark for benchmark in SUITE if not wanted or benchmark.name in wanted]


def compared(benchmark: Benchmark, before: Mapping[str, Result], now: Result) -> list[str]:
    """What to say of a benchmark that was measured again."""
    if benchmark.name not in before:
        return [f"nothing is recorded to compare it with: python -m benchmarks.suite run {benchmark.name}"]
    return [said for figure in benchmark.figures if (said := worse(figure, before[benchmark.name], now))]


def plan(benchmarks: Iterable[Benchmark]) -> None:
    """Print how long each takes, and all."""
    total = 0
    for benchmark in benchmarks:
        total += benchmark.planned_s
        print(f"{benchmark.name:12} {benchmark.planned_s:5} s  python {' '.join(benchmark.command)}")
    print(f"{'together':12} {total:5} s of {BUDGET_S}", flush=True)


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
