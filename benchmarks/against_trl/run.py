"""TRL's trainers on the example, for benchmarks/end_to_end.py: `python benchmarks/against_trl/run.py JOB.json`.

Runs in TRL's own environment. Model, prompts in their chat template, reward, batch, sampling, clipping and the loss (`dapo`, its
clip distances) are the example's; the optimizer is torch's AdamW with its betas, and its learning rate at every step is that of
`grpo run`: TRL's own warm-up begins at 0, which would cost it the first step. The job's `kind` chooses the trainer:

- `generate`: `GRPOTrainer` with transformers' `generate`, as released;
- `colocated`: `GRPOTrainer` with vLLM in its own process (benchmarks/against_trl/colocated.py);
- `async`: `AsyncGRPOTrainer` with a vLLM server (benchmarks/against_trl/asynchronous.py).

One line of JSON when the first completion is about to be sampled, {"generating": time_s}, and one a step: {"step", "reward",
"time_s", "tokens", "completions", "rate"}; `reward` is the mean over the completions that the step trains.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.against_trl.example import Example, Said, same_rates, teller


def synchronous(job: dict[str, Any], example: Example, said: Said) -> None:
    """`GRPOTrainer`, with vLLM in its process where `kind` says so."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]  TRL's environment has it
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    tried = job["settings"]
    more: dict[str, Any] = {"cache_implementation": tried.get("cache")}
    if job["kind"] == "colocated":
        from benchmarks.against_trl.colocated import prepare

        more = prepare(example)

    class Told(same_rates(GRPOTrainer, example)):
        def _generate(self, *given: Any, **named: Any) -> Any:
            said.generating()
            return super()._generate(*given, **named)

    tokenizer = AutoTokenizer.from_pretrained(example.config.model.path, padding_side="left")
    arguments = GRPOConfig(
        **example.settings(job), **more, beta=example.config.loss.kl_beta, loss_type="dapo", mask_truncated_completions=False
    )
    Told(
        model=AutoModelForCausalLM.from_pretrained(example.config.model.path, dtype=torch.float32),
        reward_funcs=example.reward, args=arguments, train_dataset=Dataset.from_list(example.rows(tokenizer)),
        processing_class=tokenizer, callbacks=[teller(example, said)],
    ).train()  # fmt: skip


def main() -> None:
    """Train, telling every step."""
    said = Said()
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

        asynchronous(job, example, said)
    else:
        synchronous(job, example, said)


if __name__ == "__main__":
    main()
