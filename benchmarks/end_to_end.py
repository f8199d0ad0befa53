"""The example by TRL's `GRPOTrainer` and by `grpo run`, one after the other: wall time to a reward.

    python benchmarks/end_to_end.py --json

Same model, warm start, prompts, reward, batch, sampling, loss, learning rate and number of prompts; TRL (PyPI, an environment
of its own, benchmarks/trl_run.py) samples with transformers' `generate` in the process that trains, with the number of threads
of `--threads` that served it best in a few steps before; ours has one generator (`OURS`). The reward is that of the completions
a step trains, on either side, as the running mean over the last `WINDOW` steps. For each seed: `to_reward_ratio`, TRL's seconds
from the first completed step until `--target` over ours (goal: 1.5), `whole_ratio` the same from the start of the command,
loading included; `steps_per_s`, `tokens_per_s` (generated), `trained_tokens_per_s` (in the loss), `idle_share` of all cores and
`peak_mib`, resident memory of all processes and Redis, of either side. Who never gets there is in `missed`, without a figure.
With `--staleness 0 1 2 4` ours runs with each bound instead, and TRL does not; `<side>.gain` is then its steps per second over
those of the first bound. The last line is one JSON object; `curves` has the rewards over seconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

if __name__ == "__main__":  # `python benchmarks/end_to_end.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report
from benchmarks.trl_environment import trl_python
from services.runtime.process_tools import die_with_parent

ROOT = Path(__file__).parent.parent
CONFIG = "examples/arithmetic/config.toml"
OURS = ("generator.count=1", "generator.max_num_seqs=512", "generator.cpu_kv_cache_mib=160", "checkpoint.every_steps=1000")
"""What serves ours best on two cores: one engine with all that two have, and no checkpoint, like TRL."""
WINDOW = 5
POLL_S = 0.5
TRIED = 6


@dataclass
class Curve:
    """One run: what it showed at the end of every step."""

    started: float
    seconds: list[float] = field(default_factory=list)  # since the start of the command
    rewards: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)  # generated since the step before
    trained: list[float] = field(default_factory=list)  # in the loss of the step
    lags: list[float] = field(default_factory=list)
    idle_share: float = 0.0
    peak_mib: float = 0.0

    def add(self, time_s: float, reward: float, tokens: float, trained: float, lag: float = 0.0) -> None:
        self.seconds.append(time_s - self.started)
        self.rewards.append(reward)
        self.tokens.append(tokens)
        self.trained.append(trained)
        self.lags.append(lag)

    def smooth(self) -> list[tuple[float, float]]:
        """Seconds from the first completed step, and the running mean of the rewards there."""
        return [
            (self.seconds[i] - self.seconds[0], sum(self.rewards[i + 1 - WINDOW : i + 1]) / WINDOW)
            for i in range(WINDOW - 1, len(self.rewards))
        ]

    def reaches(self, target: float) -> tuple[float, float]:
        """Seconds until the running mean is at the target, from the first completed step and from the start."""
        reached = next((at for at, reward in self.smooth() if reward >= target), float("inf"))
        return reached, reached + self.seconds[0]

    def per_s(self, amounts: Sequence[float]) -> float:
        """What came with every step but the first, for a second."""
        return sum(amounts[1:]) / (self.seconds[-1] - self.seconds[0])


class Watch:
    """Resident memory of a process and all it started, looked at twice a second, and what the cores did meanwhile."""

    def __init__(self, pid: int) -> None:
        self._process, self.peak_mib, self._over = psutil.Process(pid), 0.0, threading.Event()
        self._before = psutil.cpu_times()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(POLL_S):
            total = 0
            with contextlib.suppress(psutil.Error):
                for process in [self._process, *self._process.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_info().rss
            self.peak_mib = max(self.peak_mib, total / 2**20)

    def end(self) -> float:
        """Stop; the share of all cores' time that was idle."""
        self._over.set()
        self._thread.join()
        after = psutil.cpu_times()
        spent = sum(after) - sum(self._before)
        return (after.idle - self._before.idle) / spent if spent else 0.0


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, **options: Any) -> Iterator[tuple[subprocess.Popen[str], Curve]]:
    """A command whose curve is to be filled; memory and cores are entered at its end. Raises SystemExit where it fails."""
    with log.open("w") as said:
        curve = Curve(time.time())
        process = subprocess.Popen(command, cwd=ROOT, stderr=said, text=True, preexec_fn=die_with_parent, **options)
        watch = Watch(process.pid)
        try:
            yield process, curve
        finally:
            process.terminate() if sys.exc_info()[0] else process.wait()
            curve.idle_share, curve.peak_mib = watch.end(), watch.peak_mib
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {log.read_text()[-2000:]}")


def ours(folder: Path, overrides: Sequence[str]) -> Curve:
    """A whole `grpo run`."""
    given = ["run.name=ours", f"run.dir={folder}", *OURS, *overrides]
    command = [sys.executable, "-m", "services.console", "run", CONFIG, "--fresh", "--no-screen", *given]
    with running(command, folder / "ours.log", stdout=subprocess.DEVNULL) as (process, curve):
        process.wait()
    lines = (folder / "ours" / "metrics.jsonl").read_text().splitlines()
    made = 0.0
    for record in map(json.loads, lines):
        total = record["tokens/gen/total"]
        trained, lag = record["tokens/train/sum"], record["staleness/trained/mean"]
        curve.add(record["time_s"], record["reward/train/mean"], total - made, trained, lag)
        made = total
    return curve


def trl(folder: Path, overrides: Sequence[str], threads: int) -> Curve:
    """TRL's trainer on the same, with so many threads."""
    job = {
        "config": CONFIG, "overrides": list(overrides), "folder": str(folder / "trl"), "threads": threads,
        "environment": {"OMP_NUM_THREADS": str(threads)},
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    command = [str(trl_python()), str(ROOT / "benchmarks" / "trl_run.py"), str(folder / "job.json")]
    with running(command, folder / "trl.log", stdout=subprocess.PIPE) as (process, curve):
        assert process.stdout is not None
        for line in process.stdout:
            step = json.loads(line)
            curve.add(step["time_s"], step["reward"], step["tokens"], step["tokens"])  # each once, at once
    return curve


def fastest(counts: Sequence[int]) -> int:
    """The number of threads with which TRL takes the fewest seconds for `TRIED` steps."""

    def seconds(threads: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return 1 / trl(Path(folder), [f"run.steps={TRIED}"], threads).per_s([1.0] * TRIED)

    return min(counts, key=seconds) if len(counts) > 1 else counts[0]


def figures(name: str, curve: Curve, target: float) -> dict[str, float]:
    """What is told of one curve."""
    to_reward_s, whole_s = curve.reaches(target)
    told = {
        "to_reward_s": to_reward_s, "whole_s": whole_s, "steps_per_s": curve.per_s([1.0] * len(curve.seconds)),
        "tokens_per_s": curve.per_s(curve.tokens), "trained_tokens_per_s": curve.per_s(curve.trained),
        "idle_share": curve.idle_share, "peak_mib": curve.peak_mib, "lag": sum(curve.lags) / len(curve.lags),
        "last_reward": sum(curve.rewards[-WINDOW:]) / WINDOW,
    }  # fmt: skip
    return {f"{name}.{key}": value for key, value in told.items()}


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--target", type=float, default=0.7, help="reward to reach")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}), help="TRL's: the best of these is taken")
    parser.add_argument("--staleness", type=int, nargs="+", help="bounds to compare ours under, without TRL")
    options = parser.parse_args()
    subprocess.run([sys.executable, "-m", "examples.arithmetic.warmstart"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    threads = 0
    if not options.staleness:
        trl_python()
        threads = fastest(options.threads)
    samples: dict[str, list[float]] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as name:
            folder, base = Path(name), [f"run.steps={options.steps}", f"run.seed={seed}"]
            if options.staleness:
                bounds = {f"staleness_{bound}": f"admission.max_staleness={bound}" for bound in options.staleness}
                found = {side: ours(folder, [*base, bound]) for side, bound in bounds.items()}
            else:
                found = {"trl": trl(folder, base, threads), "ours": ours(folder, base)}
        told = {key: value for side, curve in found.items() for key, value in figures(side, curve, options.target).items()}
        if not options.staleness:
            for ratio, key in (("to_reward_ratio", "to_reward_s"), ("whole_ratio", "whole_s")):
                told[ratio] = told[f"trl.{key}"] / told[f"ours.{key}"]
            told["memory_ratio"] = told["ours.peak_mib"] / told["trl.peak_mib"]
            told["steps_ratio"] = told["ours.steps_per_s"] / told["trl.steps_per_s"]
        else:
            first = told[f"staleness_{options.staleness[0]}.steps_per_s"]
            told |= {f"{side}.gain": told[f"{side}.steps_per_s"] / first for side in found}
        for key, value in told.items():
            samples.setdefault(key, []).append(value)
        for side, curve in found.items():
            curves[f"{side}, seed {seed}"] = [(round(at, 1), round(reward, 3)) for at, reward in curve.smooth()]
        if not options.json:
            print(f"seed {seed}: " + ", ".join(f"{key} {value:.3g}" for key, value in told.items()), flush=True)
    missed = sorted(key for key, values in samples.items() if not all(map(math.isfinite, values)))
    finite = {key: values for key, values in samples.items() if key not in missed}
    subject = {"steps": options.steps, "target": options.target, "seeds": options.seeds, "missed": missed, "curves": curves}
    report({"benchmark": "end_to_end", **subject, "trl_threads": threads}, finite)
    return 0


if __name__ == "__main__":
    sys.exit(main())
