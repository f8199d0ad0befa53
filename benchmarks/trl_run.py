"""TRL's `GRPOTrainer` on the example, for benchmarks/end_to_end.py: `python benchmarks/trl_run.py JOB.json`.

Runs in TRL's own environment. Model, prompts in their chat template, reward, batch, sampling, learning rate, warm-up, clipping
and the loss (`dapo`, its clip distances) are the example's; the optimizer is torch's AdamW with its betas. Completions come from
transformers' `generate`, which is what TRL has on a CPU. One line of JSON a step: {"step", "reward", "time_s", "tokens"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> None:
    """Train, telling every step on the standard output of the start; whatever libraries print goes to standard error."""
    job = json.loads(Path(sys.argv[1]).read_text())
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", **job["environment"])

    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]  TRL's environment has it
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from services.config import load
    from services.config.verifiers import named
    from services.dataprep.prompts.catalogue import PromptSource
    from services.verifiers.sandbox.loaded import builtin

    config = load(job["config"], job["overrides"], environ={})
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    prompts = PromptSource(config)
    rows = [prompts.prompt(row) for row in range(len(prompts))]
    data = Dataset.from_list([{"prompt": tokenizer.decode(row.tokens), "answer": row.answer} for row in rows])
    source = config.data.sources[0]
    verifiers = [(verifier.weight, builtin(verifier, source)) for _, verifier in named(config.verifiers)]

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [
            sum(weight * verifier.score(completion, right) for weight, verifier in verifiers)
            for completion, right in zip(completions, answer, strict=True)
        ]

    class Tell(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                length = logs.get("completions/mean_length", 0.0)
                line = {"step": state.global_step, "reward": logs["reward"], "time_s": time.time(), "tokens": length * batch}
                said.write(json.dumps(line) + "\n")
                said.flush()

    batch = config.admission.prompts_per_step * config.sampling.group_size
    optimizer = config.optimizer
    arguments = GRPOConfig(
        output_dir=job["folder"], max_steps=config.run.steps, seed=config.run.seed, use_cpu=True, bf16=False, report_to=[],
        per_device_train_batch_size=batch, gradient_accumulation_steps=1, num_generations=config.sampling.group_size,
        max_completion_length=config.sampling.max_tokens, temperature=config.sampling.temperature, beta=config.loss.kl_beta,
        loss_type="dapo", epsilon=config.loss.clip_low, epsilon_high=config.loss.clip_high, mask_truncated_completions=False,
        learning_rate=optimizer.learning_rate, warmup_steps=optimizer.warmup_steps, lr_scheduler_type="constant_with_warmup",
        adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1], weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm, logging_steps=1, save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Tell()]
    )
    trainer.train()


if __name__ == "__main__":
    main()
