"""Evaluation rounds beside training (docs/evaluation.md): when, on what, how often sampled, and by whom."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from services.config.base import Section
from services.config.data import Source
from services.config.generation import Sampling

ALL = "all"
"""Stands for all evaluation sources together in the names of metrics."""


class Evaluation(Section):
    """Evaluation rounds: each is sampled by one policy version and reported when it is complete."""

    every_steps: int = Field(default=0, ge=0)
    """A round at the policy versions 0, n, 2n, … and at the last one of the run; 0: none."""
    sources: list[Source] = []
    """Prompt sources, of the kinds of `data.sources`, with names of their own; none of them is trained on."""
    prompts: int = Field(default=0, ge=0)
    """The first so many prompts of each source; 0: all."""
    samples: int = Field(default=1, ge=1)
    """Completions of each prompt: the n of pass@k."""
    ks: list[int] = [1]
    """The k of each pass@k that is reported, at most `samples`."""
    temperature: float = Field(default=1.0, ge=0)
    """Softmax temperature; 0: the likeliest token each time."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass."""
    top_k: int = Field(default=0, ge=0)
    """Number of likeliest tokens kept; 0: all."""
    max_tokens: int = Field(default=0, ge=0)
    """Longest completion in tokens; 0: `sampling.max_tokens`."""
    max_generators: int = Field(default=1, ge=1)
    """Most generators that evaluate at a time. The last version of a run is evaluated by all: nothing is left to train."""
    min_training_generators: int = Field(default=1, ge=0)
    """A generator evaluates only while so many others go on for training; 0: training may wait for a round."""
    final_s: float = Field(default=600.0, ge=0)
    """The end of the run waits so long for the round of the last version; then that round is abandoned."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.every_steps and not self.sources:
            raise ValueError(f"evaluation.every_steps = {self.every_steps} needs prompts: add [[evaluation.sources]]")
        for index, source in enumerate(self.sources):
            if source.name == ALL:
                raise ValueError(f'evaluation.sources.{index}.name = "{ALL}" stands for all sources in metrics: choose another')
            if source.weight != 1.0:
                raise ValueError(
                    f"evaluation.sources.{index}.weight = {source.weight}: every prompt is evaluated, nothing is mixed; remove it"
                )
        if not self.ks or min(self.ks) < 1 or len(set(self.ks)) < len(self.ks):
            raise ValueError(f"evaluation.ks = {self.ks} must be different numbers from 1 on, and at least one")
        if max(self.ks) > self.samples:
            raise ValueError(
                f"evaluation.ks = {self.ks}: pass@{max(self.ks)} needs as many completions of a prompt, and evaluation.samples = "
                f"{self.samples}; raise evaluation.samples or lower evaluation.ks"
            )
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"evaluation.temperature = 0 makes all evaluation.samples = {self.samples} completions of a prompt the same: "
                "set evaluation.samples = 1, or a temperature above 0"
            )
        return self

    def next_version(self, dealt_with: int, steps: int) -> int | None:
        """The first version after `dealt_with` (-1: none yet) that a run of `steps` steps evaluates; None: there is none."""
        if not self.every_steps or dealt_with >= steps:
            return None
        return min((dealt_with // self.every_steps + 1) * self.every_steps, steps)


def check_evaluation(evaluation: Evaluation, sampling: Sampling, prompt_tokens: int, model_tokens: int, generators: int) -> None:
    """Raise ValueError where a round could not be done: completions that do not fit, or no generator to spare."""
    if not evaluation.every_steps:
        return
    longest = prompt_tokens + (evaluation.max_tokens or sampling.max_tokens)
    if longest > model_tokens:
        raise ValueError(
            f"data.max_prompt_tokens + evaluation.max_tokens = {longest} exceeds model.max_tokens = {model_tokens}: "
            "lower one of the two or raise model.max_tokens"
        )
    if generators <= evaluation.min_training_generators:
        raise ValueError(
            f"evaluation.min_training_generators = {evaluation.min_training_generators} leaves none of generator.count = "
            f"{generators} to evaluate: raise generator.count, or set evaluation.min_training_generators = 0 to let training wait"
        )
