"""Evaluation rounds during training (docs/evaluation.md): when, on which prompts, how often sampled, by how many generators."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from services.config.base import Section
from services.config.data import Source
from services.config.generation import Sampling

ALL = "all"
"""Name that metrics use for all evaluation sources together."""

FINAL_S = 600.0
"""Seconds that the end of a run waits for the round of the last version before it abandons that round. All generators may take
part in it, so a round that takes longer has lost its pods or hangs.
"""


class Evaluation(Section):
    """Evaluation rounds. Each is sampled by one policy version and reported when it is complete."""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate the policy versions 0, n, 2n, … and the last one of the run. 0 disables evaluation."""
    sources: list[Source] = []
    """Prompt sources, of the same kinds as `data.sources`, with different names. None of them is trained on."""
    prompts: int = Field(default=0, ge=0)
    """Number of prompts to use from each source, from its start. 0: all."""
    samples: int = Field(default=1, ge=1)
    """Completions per prompt: the n of pass@k, which is reported for k = 1, 2, 4, … and n."""
    temperature: float = Field(default=1.0, ge=0)
    """Softmax temperature. 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling mass."""
    max_tokens: int = Field(default=0, ge=0)
    """Maximum length of a completion in tokens. 0: `sampling.max_tokens`."""
    max_generators: int = Field(default=1, ge=1)
    """Maximum number of generators that evaluate at a time, while at least one other generates for training. All of them evaluate
    the last version of a run, since no training is left. A single generator evaluates while training waits.
    """

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.every_steps and not self.sources:
            raise ValueError(f"evaluation.every_steps = {self.every_steps} needs prompts: add [[evaluation.sources]]")
        for index, source in enumerate(self.sources):
            if source.name == ALL:
                raise ValueError(f'evaluation.sources.{index}.name = "{ALL}" means all sources in metrics: choose another name')
            if source.weight != 1.0:
                raise ValueError(
                    f"evaluation.sources.{index}.weight = {source.weight} has no effect: every prompt is evaluated; remove it"
                )
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"evaluation.temperature = 0 makes all evaluation.samples = {self.samples} completions of a prompt identical: "
                "set evaluation.samples = 1, or a temperature above 0"
            )
        return self

    @property
    def ks(self) -> list[int]:
        """Which pass@k to report: the powers of two below `samples`, and `samples`."""
        return [*(2**i for i in range((self.samples - 1).bit_length())), self.samples]

    def next_version(self, dealt_with: int, steps: int) -> int | None:
        """Return the first version after `dealt_with` (-1: none yet) that a run of `steps` steps evaluates, or None."""
        if not self.every_steps or dealt_with >= steps:
            return None
        return min((dealt_with // self.every_steps + 1) * self.every_steps, steps)


def check_evaluation(evaluation: Evaluation, sampling: Sampling, prompt_tokens: int, model_tokens: int) -> None:
    """Raise ValueError if a round could never complete, since its completions do not fit."""
    if not evaluation.every_steps:
        return
    longest = prompt_tokens + (evaluation.max_tokens or sampling.max_tokens)
    if longest > model_tokens:
        raise ValueError(
            f"data.max_prompt_tokens + evaluation.max_tokens = {longest} exceeds model.max_tokens = {model_tokens}: "
            "lower one of the two or raise model.max_tokens"
        )
