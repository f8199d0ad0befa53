"""The cost of an optimizer step: ours against TRL's GRPOTrainer, on the same model, batch and lengths, on this machine's CPU.

    python benchmarks/trainer.py --json

The sides alternate. Each takes one optimizer step on the same completions, in its own process with `--threads` threads. The model
has random weights and Qwen3's shape (tied embeddings, grouped queries, 32,000 tokens); lengths are log-normal, cut off at
`--max-tokens`. Both sides are timed for forward, loss, backward, clipping and optimizer, but not for the preparation of inputs
(TRL: generation, rewards, padding; ours: fetch and packing), which on our side overlaps with the previous step anyway. Both
compute the clipped dapo loss without a reference model, the entropy and their usual metrics, in float32, without gradient
checkpointing, with AdamW and clipping to norm 1. The gradient norms of the first step must agree to 1 %, so both do the same
work.

`tokens_per_s_ratio` (goal 1.5) counts prompt and completion tokens, not padding. `peak_memory_ratio` (goal 0.7) compares the
peaks of resident memory during steps, each beyond what its process held with the model loaded: gradients and optimizer state,
which are the same on both sides, activations and logits. Both are medians over pairs of steps, against the TRL settings with the
fastest single step; `peak_memory_ratio_leanest` is against the settings that need the least memory. On a busy machine pairs
differ widely;
`tokens_per_s_ratio_of_best` compares the fastest step of each side.

TRL's settings are micro-batches of `--micro-batches` completions (it pads batches to the longest of all, so that changes little
except memory), each as released (`trl`) and with its output layer restricted to the tokens in the loss (`trl compact`), which TRL
does with Triton on GPUs and this benchmark switches on. TRL has no padding-free GRPO, and its Liger option replaces layers with
Triton kernels, which have no CPU version. Speed and memory of every setting are under `settings`. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from benchmarks.against_trl.environment import TRL, trl_python
from benchmarks.common import arguments, report

VOCABULARY = 32_000
PROMPT_TOKENS = (16, 64)
MEDIAN_TOKENS, SPREAD = 120, 0.8  # of completions: log-normal, with a mean of about 160
SAME_NORM = 0.01


def make_model(folder: Path) -> int:
    """Save a random model of Qwen3's shape with its tokenizer; return its number of parameters."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t2", pad_token="t0", eos_token="t1").save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_batch(path: Path, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Save and return completions in groups, with prompts, rewards and the advantages that TRL computes from them."""
    random = np.random.default_rng(options.seed)
    count, size = options.completions, options.group_size
    lengths = np.exp(random.normal(np.log(MEDIAN_TOKENS), SPREAD, count)).astype(np.int32).clip(4, options.max_tokens)
    prompts = [random.integers(2, VOCABULARY, random.integers(*PROMPT_TOKENS)) for _ in range(count // size)]
    prompts = [prompt.astype(np.int32) for prompt in prompts for _ in range(size)]
    rewards = random.random(count).astype(np.float32)
    groups = rewards.reshape(-1, size)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-4)
    batch = {
        "lengths": lengths,
        "tokens": random.integers(2, VOCABULARY, int(lengths.sum())).astype(np.int32),
        "prompts": np.concatenate(prompts),
        "prompt_lengths": np.array([len(prompt) for prompt in prompts]),
        "rewards": rewards,
        "advantages": advantages.ravel(),
    }
    np.savez(path, **batch)
    return batch


class Side:
    """The process of one side."""

    def __init__(self, name: str, python: Path, kind: str, job: Mapping[str, Any], folder: Path, threads: int) -> None:
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}.log"
        path = self._log.with_suffix(".json")
        path.write_text(json.dumps({**job, "folder": str(folder / "out")}))
        environ = os.environ | {
            "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
            "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        command = [str(python), str(Path(__file__).with_name("against_trl") / "trainer_sides.py"), kind, str(path)]
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.base_mib = self._answer()["base_mib"]
        self.steps: list[dict[str, float]] = []
        self.first = self.step()  # allocates the optimizer's state and warms up

    def step(self) -> dict[str, float]:
        """Take one optimizer step; return its measurements."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        answer = self._answer()
        answer["over_model_mib"] = answer["peak_mib"] - self.base_mib
        return answer

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} exited: {self._log.read_text()[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Alternate the sides, and report."""
    parameters = make_model(folder / "model")
    batch = make_batch(folder / "batch.npz", options)
    tokens = int(batch["lengths"].sum()) + len(batch["prompts"])
    job = {
        "model": str(folder / "model"), "batch": str(folder / "batch.npz"), "threads": options.threads,
        "group_size": options.group_size, "max_tokens": options.max_tokens, "row_tokens": options.row_tokens,
        "chunk_tokens": options.chunk_tokens,
    }  # fmt: skip
    peer = trl_python()
    ways = {"ours": (Path(sys.executable), "ours", job)}
    for size in options.micro_batches:
        for compact in (False, True):
            name = f"trl{' compact' if compact else ''} {size}"
            ways[name] = (peer, "trl", job | {"micro_batch": size, "compact": compact})
    sides: dict[str, Side] = {}
    try:
        for name, (python, kind, given) in ways.items():
            sides[name] = Side(name, python, kind, given, folder, options.threads)
        norms = {name: side.first["gradient_norm"] for name, side in sides.items()}
        assert all(abs(norm / norms["ours"] - 1) < SAME_NORM for norm in norms.values()), (
            f"the sides do different work: gradient norms {norms}"
        )
        for repeat in range(options.repeats):
            for side in sides.values():
                side.steps.append(side.step())
            rates = [f"{name} {tokens / side.steps[-1]['seconds']:.0f}" for name, side in sides.items()]
            print(f"{repeat + 1}/{options.repeats} tokens/s: {', '.join(rates)}", file=sys.stderr, flush=True)
    finally:
        for side in sides.values():
            side.close()
    medians = {
        name: {key: statistics.median(step[key] for step in side.steps) for key in ("seconds", "cpu_s", "over_model_mib")}
        for name, side in sides.items()
    }
    theirs = [name for name in sides if name != "ours"]

    def least(key: str, names: list[str]) -> str:
        return min(names, key=lambda name: medians[name][key])

    def best(name: str) -> float:
        return min(step["seconds"] for step in sides[name].steps)

    fastest, leanest = min(theirs, key=best), least("over_model_mib", theirs)
    released = min((name for name in theirs if "compact" not in name), key=best)
    mine = sides["ours"].steps

    def ratios(other: str, key: str) -> list[float]:
        """Return ours over theirs, pair by pair."""
        return [a[key] / b[key] for a, b in zip(mine, sides[other].steps, strict=True)]

    report(
        {
            "benchmark": "trainer",
            "against": fastest,
            "trl": TRL,
            "parameters": parameters,
            "completions": options.completions,
            "tokens": tokens,
            "mean_tokens": round(float(batch["lengths"].mean()), 1),
            "longest_tokens": int(batch["lengths"].max()),
            "threads": options.threads,
            "row_tokens": options.row_tokens,
            "tokens_per_s_ratio_of_best": {name: round(best(name) / best("ours"), 3) for name in (fastest, released)},
            "settings": {
                name: {
                    "tokens_per_s": round(tokens / found["seconds"], 1),
                    "cpu_s": round(found["cpu_s"], 2),
                    "over_model_mib": round(found["over_model_mib"], 1),
                }
                for name, found in medians.items()
            },
        },
        {
            "tokens_per_s_ratio": [1 / ratio for ratio in ratios(fastest, "seconds")],
            "tokens_per_s_ratio_as_released": [1 / ratio for ratio in ratios(released, "seconds")],
            "tokens_per_cpu_s_ratio": [1 / ratio for ratio in ratios(fastest, "cpu_s")],
            "peak_memory_ratio": ratios(fastest, "over_model_mib"),
            "peak_memory_ratio_leanest": ratios(leanest, "over_model_mib"),
            "peak_memory_ratio_as_released": ratios(released, "over_model_mib"),
            "ours_tokens_per_s": [tokens / step["seconds"] for step in mine],
            "trl_tokens_per_s": [tokens / step["seconds"] for step in sides[fastest].steps],
            **{
                f"ours_{phase}_share": [step[phase] / step["seconds"] for step in mine]
                for phase in ("forward", "backward", "step")
            },
        },
    )


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--completions", type=int, default=16, help="completions per step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=512, help="longest completion")
    parser.add_argument("--row-tokens", type=int, default=1024, help="our micro-batch, in tokens")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="tokens whose logits our side computes at a time")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 8, 16], help="TRL's micro-batches, in completions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="rounds, each with one step of every side")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
