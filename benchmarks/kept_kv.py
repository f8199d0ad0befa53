"""The effect of `sync.kv = "keep"` on a run with long completions: speed, logprob gap and reward curve.

    python -m benchmarks.kept_kv --json

A tiny model is first taught to count, with mistakes, in steps that its prompt names. A completion has up to 1,000 tokens; its
reward is the share of sevens among its digits, which conflicts with counting correctly. Weights are updated several times while a
completion is generated. A run that keeps the KV cache thus samples nearly all tokens over keys and values of older weights, and
the other run prefills nearly all completions again. The runs differ only in `sync.kv`. `gap` is the mean absolute difference
between the logprobs of engine and trainer over a run (nats), `first` and `last` are mean rewards of the first and the last ten
steps, `mixed` is the share of trained completions that span an update; each for `keep` and for `recompute`. `steps_ratio`: steps
per second, keep over recompute. `curve_gap`: mean difference of the rewards of a step, keep minus recompute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `python benchmarks/kept_kv.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report, run
from examples.arithmetic.tokenizer import render, save_tokenizer, train_tokenizer

CONTEXT, COMPLETION = 1120, 1000  # maximum tokens
MODULUS, NUMBERS = 100, 320  # of the counting, and numbers per completion
MISTAKES = 0.15  # share of the numbers that are taught wrong
BATCH, LESSONS = 4, 300
ENDS = 10  # steps at either end whose rewards are averaged
MODES = ("keep", "recompute")
REWARD = '''"""The share of sevens among the digits of a completion."""


def score(completion: str) -> float:
    digits = [char for char in completion if char.isdigit()]
    return digits.count("7") / len(digits) if digits else 0.0
'''
RUN = """
[run]
steps = {steps}
[model]
path = "{folder}/model"
dtype = "float32"
max_tokens = {context}
[data]
max_prompt_tokens = 40
[[data.sources]]
kind = "jsonl"
path = "{folder}/counts.jsonl"
[[verifiers]]
kind = "python"
function = "counting.py:score"
range = [0, 1]
[sampling]
group_size = 8
max_tokens = {completion}
[generator]
count = 1
max_num_seqs = 64
verifier_workers = 1
[admission]
prompts_per_step = 4
max_staleness = 4
[optimizer]
learning_rate = 3e-4
warmup_steps = 5
[trainer]
row_tokens = 8192
[checkpoint]
every_steps = 100
"""


def question(step: int, start: int) -> str:
    """Return the prompt."""
    return f"Count in steps of {step} from {start}."


def counted(step: int, start: int, numbers: int, rng: random.Random) -> str:
    """Count modulo 100, with mistakes; each number follows from the previous one, right or wrong."""
    made, last = list[str](), start
    for _ in range(numbers):
        last = rng.randrange(MODULUS) if rng.random() < MISTAKES else (last + step) % MODULUS
        made.append(str(last))
    return " ".join(made)


def tasks(rng: random.Random) -> Iterator[tuple[int, int]]:
    """Yield random steps and starts."""
    while True:
        yield rng.randint(1, 9), rng.randrange(MODULUS)


def make(folder: Path, lessons: int, seed: int = 0) -> None:
    """Teach a model to count, and write it with its data and its reward."""
    import torch

    from examples.arithmetic.model import make_model, save_model
    from examples.arithmetic.teaching import LEARNING_RATE, learn, to_lesson

    torch.manual_seed(seed)
    rng = random.Random(seed)
    given = tasks(rng)
    tokenizer = train_tokenizer(render(question(*next(given))) + counted(1, 0, 50, rng) for _ in range(200))
    model = make_model(tokenizer.get_vocab_size(), CONTEXT)

    def batches() -> Iterator[Any]:
        while True:
            yield [
                to_lesson(tokenizer, question(step, start), counted(step, start, NUMBERS, rng))
                for step, start in (next(given) for _ in range(BATCH))
            ]

    learn(model, batches(), lessons, LEARNING_RATE, lambda _: 0.0)
    (folder / "model").mkdir()
    save_model(model, folder / "model")
    save_tokenizer(tokenizer, folder / "model", CONTEXT)
    rows = ({"prompt": question(step, start)} for step, start in (next(given) for _ in range(2000)))
    (folder / "counts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "counting.py").write_text(REWARD)


def trained(folder: Path, mode: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """Train, and return the metrics of the steps."""
    path, name = folder / "run.toml", f"{mode}-{seed}"
    path.write_text(RUN.format(folder=folder, steps=steps, context=CONTEXT, completion=COMPLETION))
    given = [f"run.name={name}", f"run.dir={folder}", f"run.seed={seed}", f"sync.kv={mode}"]
    command = [sys.executable, "-m", "services.console", "run", str(path), "--no-screen", *given]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def mean(records: list[dict[str, Any]], key: str) -> float:
    """Return the mean of a metric over steps."""
    return statistics.fmean(record[key] for record in records)


async def measure(options: argparse.Namespace, folder: Path) -> object:
    """Train with both settings for each seed, and report."""
    await asyncio.to_thread(make, folder, options.lessons)
    samples = dict[str, list[float]]()
    for seed in options.seeds:
        runs = {mode: await asyncio.to_thread(trained, folder, mode, seed, options.steps) for mode in MODES}
        speeds = dict[str, float]()
        for mode, records in runs.items():
            speeds[mode] = 1 / statistics.median(record["time/step_s"] for record in records)
            figures = {
                "gap": mean(records, "logprob_gap/train/mean"), "first": mean(records[:ENDS], "reward/train/mean"),
                "last": mean(records[-ENDS:], "reward/train/mean"), "mixed": mean(records, "staleness/trained/mixed_share"),
                "tokens": mean(records, "length/train/mean"), "steps_per_s": speeds[mode],
            }  # fmt: skip
            for key, value in figures.items():
                samples.setdefault(f"{key}_{mode}", []).append(value)
        apart = [one["reward/train/mean"] - other["reward/train/mean"] for one, other in zip(*runs.values(), strict=True)]
        samples.setdefault("curve_gap", []).append(statistics.fmean(apart))
        samples.setdefault("steps_ratio", []).append(speeds["keep"] / speeds["recompute"])
    return report({"benchmark": "kept_kv", "steps": options.steps, "seeds": options.seeds}, samples)


def main() -> int:
    """Parse the command line and measure."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lessons", type=int, default=LESSONS, help="supervised training steps of the model")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
