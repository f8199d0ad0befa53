"""Seconds to a reward on the example: TRL's trainers and `grpo run`, one after another.

    python benchmarks/end_to_end.py --json
    python benchmarks/end_to_end.py --staleness 0 1 2 4 --json     # ours with each bound, without TRL

All runs use the same model, warm start, prompts in the same order, reward, batch, sampling, clipping, loss, number of steps and,
step by step, learning rate. A run whose steps trained another number of completions or at another rate fails. There are four
sides (against_trl/sides.py), each in its own process: `ours`, a whole `grpo run`; `trl`, `GRPOTrainer` with transformers'
`generate`; `trl_vllm`, the same with vLLM in its process; `trl_async`, `AsyncGRPOTrainer` with a vLLM server. TRL (PyPI) has its
own environment. TRL's threads, micro-batches, KV cache, requests in flight and staleness bound are tuned first, in runs of
`TUNED_STEPS` steps. `tried` has the steps per second of each setting. The fastest is compared with ours, which is not tuned.

A side's clock starts when it begins to sample its first completion; for `from_command`, it starts with its command and includes
loading. Per seed, `ratio_05` to `ratio_08` are the seconds of `trl` over ours until the curve (against_trl/curves.py) has that
reward; `trl_vllm_ratio_…` and `trl_async_ratio_…` are those of the other sides. The key without a number is the smallest of the
four. `unreached` names the sides that miss a target. If TRL misses it, the length of its whole run is used, which favours TRL; if
ours does, the ratio is 0; if both do, the seed has no ratio. The report has the median, smallest and largest value over seeds.

Every run is written to `--results` when it ends. The same command resumes from there, unless the code or the options changed. A
run that fails or takes longer than `--limit-s` is in `failed` with its error, and the next command retries it; the other runs
continue. Sides alternate, in the opposite order for every other seed. The last line is one JSON object; `curves` has rewards over
seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `python benchmarks/end_to_end.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.against_trl.curves import Curve, ratios, unreached
from benchmarks.against_trl.environment import trl_python
from benchmarks.against_trl.sides import CONFIG, OURS, ROOT, TRIED, TRL, RunFailed, side
from benchmarks.common import arguments, report
from services.config import load

TUNED_STEPS = 6
DIGITS = 4
SLOWEST = 0.0  # steps per second recorded for settings that failed


class Record:
    """The runs so far, in a file to which each is written when it ends."""

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        """Resume from the runs in the file if they have the same subject."""
        self._path, self._subject = path, dict(subject)
        held = json.loads(path.read_text()) if path.exists() else {}
        same = held.get("subject") == json.loads(json.dumps(self._subject))
        self.curves = {name: Curve(**curve) for name, curve in held["runs"].items()} if same else {}
        self.tried: dict[str, dict[str, float]] = held["tried"] if same else {}
        self.failed: dict[str, str] = {}

    def add(self, name: str, curve: Curve) -> None:
        """Add a run, and write the file."""
        self.curves[name] = curve
        self._write()

    def add_tried(self, name: str, change: str, steps_per_s: float) -> None:
        """Add the speed of a side with changed settings, and write the file."""
        self.tried.setdefault(name, {})[change] = round(steps_per_s, DIGITS)
        self._write()

    def settings(self, name: str) -> dict[str, Any]:
        """Return the fastest of the settings that were tried for one of TRL's sides."""
        tried = self.tried.get(name, {"{}": SLOWEST})
        return {**TRL[name], **json.loads(max(tried, key=lambda change: tried[change]))}

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        runs = {name: curve.to_json() for name, curve in self.curves.items()}
        whole = {"subject": self._subject, "tried": self.tried, "runs": runs}
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(whole) + "\n")
        part.replace(self._path)

    def end(self) -> None:
        """Remove the file if no run failed, so that the next command measures again instead of resuming."""
        if not self.failed:
            self._path.unlink(missing_ok=True)


def subject_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the runs of one comparison have in common."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {"code": head, "steps": options.steps, "ours": OURS, "trl": TRL, "untried": options.untried}


def try_settings(record: Record, sides: Sequence[str], limit_s: float) -> None:
    """Run each of TRL's sides briefly with every setting that is not recorded yet."""
    for name in (each for each in sides if each in TRL):
        for change in TRIED[name]:
            if (key := json.dumps(change)) in record.tried.get(name, {}):
                continue
            try:
                curve = side(name, [f"run.steps={TUNED_STEPS}"], limit_s, {**TRL[name], **change})
                steps_per_s = curve.per_s([1.0] * len(curve.seconds))
            except RunFailed as failure:
                print(f"{name} {key}: {failure}", file=sys.stderr, flush=True)
                steps_per_s = SLOWEST
            record.add_tried(name, key, steps_per_s)
            print(f"{name} {key}: {steps_per_s:.3f} steps/s", file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, sides: Sequence[str]) -> Record:
    """Run every side with every seed that is not recorded yet."""
    record = Record(options.results, subject_of(options))
    if not options.untried:
        try_settings(record, sides, options.limit_s)
    for turn, seed in enumerate(options.seeds):
        overrides = [f"run.steps={options.steps}", f"run.seed={seed}"]
        config = load(CONFIG, overrides, environ={})
        peak, warmup = config.optimizer.learning_rate, config.optimizer.warmup_steps
        rates = [peak * min(1.0, (step + 1) / max(1, warmup)) for step in range(options.steps)]
        for name in sides if turn % 2 == 0 else reversed(sides):
            run = f"{name}/{seed}"
            if run in record.curves:
                continue
            try:
                curve = side(name, overrides, options.limit_s, record.settings(name) if name in TRL else None)
                if fault := curve.fault(options.steps, config.admission.prompts_per_step * config.sampling.group_size, rates):
                    raise RunFailed(fault)
            except RunFailed as failure:
                record.failed[run] = str(failure)
                print(f"{run}: {failure}", file=sys.stderr, flush=True)
                continue
            record.add(run, curve)
            timing = f"{curve.whole():.1f} s from its first completion, {curve.generating:.1f} s before, load {curve.load:.1f}"
            print(f"{run}: {timing}, last reward {curve.rewards[-1]:.3f}", file=sys.stderr, flush=True)
    return record


def against_trl(found: Mapping[str, Curve], targets: Sequence[float]) -> dict[str, float]:
    """Return the figures of one seed: each of TRL's sides against ours."""
    figures: dict[str, float] = {}
    mine = found.get("ours")
    for name in TRL:
        if mine is None or (peer := found.get(name)) is None:
            continue
        command = "from_command_ratio" if name == "trl" else f"{name}_from_command_ratio"
        figures |= ratios("ratio" if name == "trl" else f"{name}_ratio", peer, mine, targets)
        figures |= ratios(command, peer, mine, targets, "command")
        prefix = "" if name == "trl" else f"{name}_"
        figures[f"{prefix}steps_per_s_ratio"] = mine.per_s([1.0] * len(mine.seconds)) / peer.per_s([1.0] * len(peer.seconds))
        figures[f"{prefix}tokens_per_s_ratio"] = mine.per_s(mine.tokens) / peer.per_s(peer.tokens)
        figures[f"{prefix}memory_ratio"] = mine.peak_mib / peer.peak_mib
    return figures


def against_bound(found: Mapping[str, Curve], bounds: Sequence[int], targets: Sequence[float]) -> dict[str, float]:
    """Return the figures of one seed: every bound against the first."""
    figures: dict[str, float] = {}
    first = found.get(f"staleness_{bounds[0]}")
    for bound in bounds[1:]:
        if first is None or (mine := found.get(f"staleness_{bound}")) is None:
            continue
        figures |= ratios(f"staleness_{bound}.ratio", first, mine, targets)
        figures[f"staleness_{bound}.gain"] = mine.per_s([1.0] * len(mine.seconds)) / first.per_s([1.0] * len(first.seconds))
    return figures


def figures_of(found: Mapping[str, Curve], options: argparse.Namespace) -> dict[str, float]:
    """Return all figures of one seed."""
    alone = {key: value for name, curve in found.items() for key, value in curve.figures(name).items()}
    bounds, targets = options.staleness, options.targets
    return alone | (against_bound(found, bounds, targets) if bounds else against_trl(found, targets))


def blank() -> Curve:
    """Return a run of two steps, from which the names of all figures follow."""
    curve = Curve(0.0, 0.0, peak_mib=1.0)
    for step in (1, 2):
        curve.add(float(step), 0.0, 1.0, 1.0, completions=1, rate=1.0)
    return curve


def print_report(record: Record, options: argparse.Namespace, sides: Sequence[str]) -> None:
    """Print the last line of the output."""
    samples: dict[str, list[float]] = {}
    for seed in options.seeds:
        found = {name: record.curves[run] for name in sides if (run := f"{name}/{seed}") in record.curves}
        for key, value in figures_of(found, options).items():
            samples.setdefault(key, []).append(value)
    finite = {key: known for key, values in samples.items() if (known := [value for value in values if math.isfinite(value)])}
    curves = {
        f"{name}, seed {seed}": [(round(at - curve.generating, 1), round(reward, 3)) for at, reward in curve.smooth()]
        for name in sides
        for seed in options.seeds
        if (curve := record.curves.get(f"{name}/{seed}"))
    }
    report(
        {
            "benchmark": "end_to_end", "steps": options.steps, "targets": options.targets, "seeds": options.seeds,
            "missed": sorted(set(figures_of(dict.fromkeys(sides, blank()), options)) - set(finite)),
            "unreached": unreached(record.curves, options.targets),
            "failed": record.failed, "tried": record.tried,
            "settings": {name: record.settings(name) if name in TRL else OURS for name in sides},
            "values": {
                key: [round(value, DIGITS) for value in values]
                for key, values in finite.items()
                if "ratio" in key and not key.endswith("_s")
            },
            "curves": curves,
        },
        finite,
    )  # fmt: skip


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--targets", type=float, nargs="+", default=[0.5, 0.6, 0.7, 0.8], help="rewards to reach")
    parser.add_argument("--sides", nargs="+", default=["trl", "ours", "trl_vllm", "trl_async"], help="sides to run")
    parser.add_argument("--staleness", type=int, nargs="+", help="compare ours with these bounds, without TRL")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "end_to_end.json", help="file to resume from")
    parser.add_argument("--limit-s", type=float, default=300, help="time limit of a run")
    parser.add_argument("--untried", action="store_true", help="use TRL's settings of against_trl/sides.py, without tuning")
    options = parser.parse_args()
    subprocess.run([sys.executable, "-m", "examples.arithmetic.warmstart"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    if not options.staleness:
        trl_python()
    sides = [f"staleness_{bound}" for bound in options.staleness] if options.staleness else options.sides
    if options.staleness:
        options.results = options.results.with_name("staleness.json")
    record = measure(options, sides)
    print_report(record, options, sides)
    record.end()
    return 0 if record.curves else 1


if __name__ == "__main__":
    sys.exit(main())
