"""The tokens that replay saves: how many the example generates until it has the reward that it reaches without replay.

    python benchmarks/reuse.py --json

Runs examples/arithmetic twice for each seed with `grpo run`: unchanged, where each group is trained on once, and with the
`--replay` overrides (by default a prioritised table and three uses). Model, prompts and learning rate are the same. The second
run has 1.5 times as many steps, since it generates less in each. The reward is that of fresh completions (`reward/gen/mean`),
never of the groups drawn from the table, as a running mean over the last `WINDOW` completions. The target is the first run's mean
over its last quarter.
`tokens_ratio` is the second run's tokens at the target over the first's (goal: 0.7 or less); `missed` counts the seeds where the
second run never reached it. Curves go to `--plot`. The last line is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # `python benchmarks/reuse.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report

CONFIG = "examples/arithmetic/config.toml"
WINDOW = 2560  # completions: ten steps of the example
BOUND = "admission.max_staleness=2"  # of both sides: a group can be trained three times
REPLAY = ("replay.sampler=prioritized", "replay.max_uses=3")


def run(name: str, seed: int, folder: Path, overrides: Sequence[str]) -> Path:
    """Run the example to its end; return its metrics.jsonl."""
    given = [f"run.name={name}", f"run.seed={seed}", f"run.dir={folder}", BOUND, *overrides]
    command = [sys.executable, "-m", "services.console.commands", "run", CONFIG, "--fresh", "--no-screen", *given]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / name / "metrics.jsonl"


def curve(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens generated so far [n] and the running mean of the fresh completions' rewards [n], by step."""
    rows = {int(row["step"]): row for line in path.read_text().splitlines() if "step" in (row := json.loads(line))}
    tokens, rewards, counts = [], [], []
    before = 0.0
    for _, row in sorted(rows.items()):
        total = row["tokens/gen/total"]
        if total > before:
            tokens.append(total)
            rewards.append(row["reward/gen/mean"])
            counts.append((total - before) / row["length/gen/mean"])
            before = total
    made, earned = np.cumsum(counts), np.cumsum(np.multiply(counts, rewards))
    first = np.searchsorted(made, made - WINDOW)  # the last WINDOW completions up to each step, or slightly fewer
    made_before, earned_before = np.concatenate(([0.0], made)), np.concatenate(([0.0], earned))
    return np.array(tokens), (earned - earned_before[first]) / (made - made_before[first])


def tokens_until(tokens: np.ndarray, rewards: np.ndarray, target: float) -> float:
    """Return the tokens generated when the reward first reaches the target; infinity if it never does."""
    reached = np.flatnonzero(rewards >= target)
    return float(tokens[reached[0]]) if len(reached) else float("inf")


def plot(curves: Sequence[tuple[str, np.ndarray, np.ndarray]], path: Path) -> None:
    """Plot the reward over generated tokens, one line per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    panel = figure.subplots()
    for name, tokens, rewards in curves:
        panel.plot(tokens, rewards, label=name, linestyle="--" if "replay" in name else "-")
    panel.set(xlabel="generated tokens", ylabel="reward of fresh completions")
    panel.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--replay", nargs="+", default=list(REPLAY), metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, default=Path("runs/reuse"))
    parser.add_argument("--plot", type=Path, help="write the curves as a PNG")
    options = parser.parse_args()
    curves, samples, missed = [], {"tokens_ratio": [], "target": [], "end_ratio": []}, 0
    for seed in options.seeds:
        once = curve(run(f"once-{seed}", seed, options.folder, [f"run.steps={options.steps}"]))
        again = curve(run(f"replay-{seed}", seed, options.folder, [f"run.steps={options.steps * 3 // 2}", *options.replay]))
        curves += [(f"once, seed {seed}", *once), (f"replay, seed {seed}", *again)]
        target = float(once[1][-(len(once[1]) // 4) :].mean())
        ratio = tokens_until(*again, target) / tokens_until(*once, target)
        missed += ratio == float("inf")
        samples["target"].append(target)
        samples["end_ratio"].append(float(again[1][-1]) / target)
        if ratio != float("inf"):
            samples["tokens_ratio"].append(ratio)
    if options.plot:
        plot(curves, options.plot)
    subject = {"benchmark": "reuse", "steps": options.steps, "replay": options.replay, "seeds": options.seeds, "missed": missed}
    report(subject, {name: values for name, values in samples.items() if values})
    return 0


if __name__ == "__main__":
    sys.exit(main())
