"""Train the example with one of TRL's trainers, for benchmarks/end_to_end.py: `python benchmarks/against_trl/run.py JOB.json`.

Runs in TRL's own environment. Model, prompts in their chat template and order, reward, batch, sampling, clipping and loss
(`dapo`, with its clip bounds) are the example's. The optimizer is torch's AdamW with the example's betas. Its learning rate at
every step is that of `grpo run`, since TRL's own warm-up starts at 0 and would waste the first step. The job's `kind` selects the
trainer:

- `generate`: `GRPOTrainer` with transformers' `generate`, as released;
- `colocated`: `GRPOTrainer` with vLLM in its own process (benchmarks/against_trl/colocated.py);
- `async`: `AsyncGRPOTrainer` with a vLLM server (benchmarks/against_trl/asynchronous.py).

Prints one JSON line when sampling starts, {"generating": time_s}, and one per step: {"step", "reward", "time_s", "tokens",
"completions", "rate", "lag"}. `reward` is the mean over the completions that the step trains on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.against_trl.example import Example, Output, same_rates, step_reporter


def synchronous(job: dict[str, Any], example: Example, output: Output) -> None:
    """Train with `GRPOTrainer`, with vLLM in its process if `kind` is `colocated`."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]  TRL's environment has it
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    settings = job["settings"]
    more: dict[str, Any] = {"cache_implementation": settings.get("cache")}
    if job["kind"] == "colocated":
        from benchmarks.against_trl.colocated import prepare

        more = prepare(example)

    class ReportingTrainer(same_rates(GRPOTrainer, example)):
        def _generate(self, *given: Any, **named: Any) -> Any:
            output.generating()
            return super()._generate(*given, **named)

    tokenizer = AutoTokenizer.from_pretrained(example.config.model.path, padding_side="left")
    arguments = GRPOConfig(
        **example.settings(job), **more, beta=example.config.loss.kl_beta, loss_type="dapo", mask_truncated_completions=False,
        shuffle_dataset=False,
    )  # fmt: skip
    ReportingTrainer(
        model=AutoModelForCausalLM.from_pretrained(example.config.model.path, dtype=torch.float32),
        reward_funcs=example.reward, args=arguments, train_dataset=Dataset.from_list(example.rows(tokenizer)),
        processing_class=tokenizer, callbacks=[step_reporter(example, output)],
    ).train()  # fmt: skip


def main() -> None:
    """Train, and report every step."""
    output = Output()
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(
        CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1",
        OMP_NUM_THREADS=str(job["settings"]["threads"]),
    )  # fmt: skip
    if job["kind"] != "generate":
        from benchmarks.against_trl.colocated import ENVIRONMENT

        os.environ.update(ENVIRONMENT)
    import torch

    torch.set_num_threads(job["settings"]["threads"])
    example = Example(job["config"], job["overrides"])
    if job["kind"] == "async":
        from benchmarks.against_trl.asynchronous import asynchronous

        asynchronous(job, example, output)
    else:
        synchronous(job, example, output)


if __name__ == "__main__":
    main()
