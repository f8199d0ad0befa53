"""The example as TRL's trainers are given it, and the lines by which they tell how they get on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any


class Said:
    """The standard output of the start; whatever libraries print goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._generating = False

    def say(self, **answer: Any) -> None:
        """Write one line."""
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    def generating(self) -> None:
        """Say, once, that the first completion is about to be sampled."""
        if not self._generating:
            self._generating = True
            self.say(generating=time.time())


class Example:
    """The example's configuration, and what TRL's trainers take of it. Pickles as its command line."""

    def __init__(self, path: str, overrides: list[str]) -> None:
        self.path, self.overrides = path, overrides

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "overrides": self.overrides}

    @cached_property
    def config(self) -> Any:
        """The run's configuration."""
        from services.config import load

        return load(self.path, self.overrides, environ={})

    @cached_property
    def verifiers(self) -> list[tuple[float, Any]]:
        """The example's verifiers with their weights."""
        from services.config.verifiers import named
        from services.verifiers.sandbox.loaded import builtin

        return [(verifier.weight, builtin(verifier, self.config.data.sources[0])) for _, verifier in named(self.config.verifiers)]

    @property
    def completions(self) -> int:
        """Completions of a step."""
        return self.config.admission.prompts_per_step * self.config.sampling.group_size

    def reward(self, completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        """TRL's reward function: completions are texts, or conversations of one message."""
        texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
        return [
            sum(weight * verifier.score(text, right) for weight, verifier in self.verifiers)
            for text, right in zip(texts, answer, strict=True)
        ]

    def rows(self, tokenizer: Any) -> list[dict[str, str]]:
        """Prompts, rendered by the chat template, with their answers."""
        from services.dataprep.prompts.catalogue import PromptSource

        prompts = PromptSource(self.config)
        rows = [prompts.prompt(row) for row in range(len(prompts))]
        return [{"prompt": tokenizer.decode(row.tokens), "answer": row.answer} for row in rows]

    def conversations(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The same prompts as messages, which the chat template renders to the same tokens."""
        from services.dataprep.prompts.rows import read_rows
        from services.dataprep.prompts.tokenizer import messages_of

        data = self.config.data
        rows = [{"prompt": messages_of(row, data), "answer": row.answer} for source in data.sources for row in read_rows(source)]
        for row, rendered in zip(rows, self.rows(tokenizer), strict=True):
            text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            assert (text, row["answer"]) == (rendered["prompt"], rendered["answer"])
        return rows

    def settings(self, job: dict[str, Any]) -> dict[str, Any]:
        """Arguments that all of TRL's configurations have."""
        config, optimizer = self.config, self.config.optimizer
        loss = (config.loss.policy, config.loss.denominator, config.loss.entropy_coefficient, config.advantage.kind)
        assert loss == ("dapo", "token", 0.0, "standard"), "TRL is given this loss, not the example's"
        assert (optimizer.schedule, optimizer.weight_decay) == ("constant", 0.0), "TRL is given this, not the example's"
        batch, micro_batch = self.completions, job["settings"]["micro_batch"]
        return {
            "output_dir": job["folder"], "max_steps": config.run.steps, "seed": config.run.seed, "use_cpu": True, "bf16": False,
            "report_to": [], "per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": batch // micro_batch,
            "num_generations": config.sampling.group_size, "max_completion_length": config.sampling.max_tokens,
            "temperature": config.sampling.temperature, "epsilon": config.loss.clip_low, "epsilon_high": config.loss.clip_high,
            "learning_rate": optimizer.learning_rate, "adam_beta1": optimizer.betas[0], "adam_beta2": optimizer.betas[1],
            "weight_decay": 0.0, "max_grad_norm": optimizer.max_grad_norm, "logging_steps": 1, "save_strategy": "no",
            "disable_tqdm": True, "gradient_checkpointing": False, "dataloader_pin_memory": False,
        }  # fmt: skip


def same_rates(trainer: type[Any], example: Example) -> type[Any]:
    """That trainer with the learning rates of `grpo run`."""
    import torch

    warmup = example.config.optimizer.warmup_steps

    class Scheduled(trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            chosen = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: min(1.0, (step + 1) / max(warmup, 1)))
            self._created_lr_scheduler = True
            return self.lr_scheduler

    return Scheduled


def teller(example: Example, said: Said, of_batch: Callable[[], dict[str, float]] | None = None) -> Any:
    """A callback that tells every step. `of_batch`: reward, tokens and completions of the step's batch, if the log is not its."""
    from transformers import TrainerCallback

    class Tell(TrainerCallback):
        rate = 0.0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            self.rate = optimizer.param_groups[0]["lr"]

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                now = time.time()
                found = of_batch() if of_batch else {
                    "reward": logs["reward"], "tokens": logs["completions/mean_length"] * example.completions,
                    "completions": example.completions,
                }  # fmt: skip
                lag = logs.get("sample/staleness_mean", 0.0)
                said.say(step=state.global_step, time_s=now, rate=self.rate, lag=lag, **found)

    return Tell()
