"""The example as TRL's trainers receive it, and the lines in which they report their progress."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any


class Output:
    """The process's original standard output; what libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._generating = False

    def write(self, **values: Any) -> None:
        """Write one JSON line."""
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()

    def generating(self) -> None:
        """Report, on the first call only, that sampling starts."""
        if not self._generating:
            self._generating = True
            self.write(generating=time.time())


class Example:
    """The example's configuration, and what TRL's trainers need from it. Pickled as its path and overrides."""

    def __init__(self, path: str, overrides: list[str]) -> None:
        self.path, self.overrides = path, overrides

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "overrides": self.overrides}

    @cached_property
    def config(self) -> Any:
        """Return the run's configuration."""
        from services.config import load

        return load(self.path, self.overrides, environ={})

    @cached_property
    def verifiers(self) -> list[tuple[float, Any]]:
        """Return the example's verifiers with their weights."""
        from services.config.verifiers import named
        from services.verifiers.loaded import builtin

        return [(verifier.weight, builtin(verifier, self.config.data.sources[0])) for _, verifier in named(self.config.verifiers)]

    @property
    def completions(self) -> int:
        """Return the number of completions per step."""
        return self.config.admission.prompts_per_step * self.config.sampling.group_size

    def reward(self, completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        """Score completions as TRL's reward function; they are texts, or conversations of one message."""
        texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
        return [
            sum(weight * verifier.score(text, right) for weight, verifier in self.verifiers)
            for text, right in zip(texts, answer, strict=True)
        ]

    @cached_property
    def prompts(self) -> Any:
        """Return all prompts, tokenised, by row."""
        from services.dataprep.prompts.catalogue import PromptSource

        return PromptSource(self.config)

    @cached_property
    def order(self) -> list[int]:
        """Return all rows in the order in which `grpo run` issues them."""
        from services.dataprep.prompts.order import PromptOrder

        config = self.config
        order = PromptOrder(self.prompts.spans, config.run.seed, config.data.shuffle, config.slots)
        return [pick.row for pick in order.draft(len(self.prompts), 0, {}).picks]

    def rows(self, tokenizer: Any) -> list[dict[str, str]]:
        """Return the prompts in `order`, rendered with the chat template, with their answers."""
        rows = map(self.prompts.prompt, self.order)
        return [{"prompt": tokenizer.decode(row.tokens), "answer": row.answer} for row in rows]

    def conversations(self, tokenizer: Any) -> list[dict[str, Any]]:
        """Return the same prompts as messages, which the chat template renders to the same text."""
        from services.dataprep.prompts.rows import read_rows
        from services.dataprep.prompts.tokenizer import messages_of

        data = self.config.data
        unordered = [row for source in data.sources for row in read_rows(source)]
        rows = [{"prompt": messages_of(unordered[row], data), "answer": unordered[row].answer} for row in self.order]
        for row, rendered in zip(rows, self.rows(tokenizer), strict=True):
            text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            assert (text, row["answer"]) == (rendered["prompt"], rendered["answer"])
        return rows

    def settings(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that all of TRL's configurations share."""
        config, optimizer = self.config, self.config.optimizer
        loss = (config.loss.policy, config.loss.denominator, config.loss.entropy_coefficient, config.advantage.kind)
        assert loss == ("dapo", "token", 0.0, "standard"), "TRL always gets this loss, whatever the example's"
        assert (optimizer.schedule, optimizer.weight_decay) == ("constant", 0.0), "TRL always gets this, whatever the example's"
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
    """Return a subclass of the trainer that uses the learning rates of `grpo run`."""
    import torch

    warmup = example.config.optimizer.warmup_steps

    class Scheduled(trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            chosen = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: min(1.0, (step + 1) / max(warmup, 1)))
            self._created_lr_scheduler = True
            return self.lr_scheduler

    return Scheduled


def step_reporter(example: Example, output: Output, of_batch: Callable[[], dict[str, float]] | None = None) -> Any:
    """Return a callback that reports every step.

    `of_batch` returns reward, tokens and completions of the step's batch; it is needed if the log is about another batch.
    """
    from transformers import TrainerCallback

    class StepReporter(TrainerCallback):
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
                output.write(step=state.global_step, time_s=now, rate=self.rate, lag=lag, **found)

    return StepReporter()
