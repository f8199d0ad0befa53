"""The policy loss: which one, its correction, its denominator, and what of it works together."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from services.config.base import Section

CLIPS = ("clip_low", "clip_high", "divergence", "divergence_bound")
"""Keys that only some of the policy losses read."""

POLICIES: dict[str, tuple[str, ...]] = {
    "grpo": ("clip_low",),
    "dapo": ("clip_low", "clip_high"),
    "dr_grpo": ("clip_low",),
    "cispo": ("clip_high",),
    "gspo": ("clip_low", "clip_high"),
    "reinforce": ("clip_low", "clip_high"),
    "dppo": ("divergence", "divergence_bound"),
}
"""Policy losses by name, and which of `CLIPS` each reads; one of the user's own may read all."""

CORRECTION = (
    "correction_lower",
    "correction_upper",
    "correction_token_mask",
    "correction_sequence_mask",
    "correction_variation_mask",
)
"""Keys of the train/infer correction."""

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Loss(Section):
    """The policy loss (formulas: docs/semantics.md)."""

    policy: str = "dapo"
    """`grpo` (symmetric clip), `dapo` (clip-higher), `dr_grpo`, `cispo`, `gspo`, `reinforce`, `dppo`, or
    `package.module:function` for one of your own (docs/semantics.md)."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Lower clip distance of the ratio; for `grpo` and `dr_grpo` both. Not for `cispo` and `dppo`."""
    clip_high: float = Field(default=0.272, ge=0)
    """Upper clip distance of the ratio: `dapo`, `cispo`, `gspo`, `reinforce`."""
    divergence: Literal["tv", "kl"] = "tv"
    """`dppo`: divergence from the generating policy of a token against all others, total variation or Kullback-Leibler."""
    divergence_bound: float = Field(default=0.1, gt=0)
    """`dppo`: a token beyond it is masked where the update would lead farther away."""
    old: Literal["recompute", "behaviour"] = "recompute"
    """Policy that the ratio starts from: the weights at the start of the step (one mini-batch: the forward pass that is made
    anyway, more: one more pass), or the logprobs the generators gave. `dppo` always takes these."""
    kl_beta: float = Field(default=0.05, ge=0)
    """Weight of the KL to the reference policy; 0 loads none."""
    kl_estimator: Literal["k1", "k2", "k3", "k1_weighted"] = "k3"
    """Estimator of that KL."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus; 0: entropy is reported and nothing else."""
    correction_lower: float = Field(default=0.0, ge=0)
    """Lower bound of the train/infer importance weight."""
    correction_upper: float = Field(default=2.0, gt=0)
    """Upper bound of the train/infer importance weight (truncated importance sampling)."""
    correction_token_mask: list[float] = []
    """[lower, upper]: tokens whose train/infer ratio lies outside get weight 0; empty: none."""
    correction_sequence_mask: list[float] = []
    """[lower, upper]: responses the geometric mean of whose ratios lies outside get weight 0; empty: none."""
    correction_variation_mask: float = Field(default=0.0, ge=0)
    """In a response whose mean |ratio - 1| / 2 exceeds this, tokens that the update would move farther get weight 0; 0: none."""
    denominator: Literal["token", "constant", "sequence", "group"] = "token"
    """The sum over tokens becomes their mean over all ranks (`token`), is divided by `denominator_tokens` (`constant`), or is
    a mean of token means: over responses (`sequence`) or groups (`group`)."""
    denominator_tokens: int = Field(default=0, ge=0)
    """The constant, for `denominator = "constant"`."""

    @property
    def from_behaviour(self) -> bool:
        """Whether the ratio starts from the generators' logprobs, so that there is nothing left to correct."""
        return self.old == "behaviour" or self.policy == "dppo"

    @field_validator("policy")
    @classmethod
    def _names_a_loss(cls, name: str) -> str:
        if name not in POLICIES and not IMPORT_PATH.fullmatch(name):
            raise ValueError(f"is none of {', '.join(POLICIES)}; write one of them, or package.module:function for your own")
        return name

    @field_validator("correction_token_mask", "correction_sequence_mask")
    @classmethod
    def _lies_around_one(cls, bounds: list[float]) -> list[float]:
        if bounds and not (len(bounds) == 2 and 0 <= bounds[0] <= 1 <= bounds[1]):
            raise ValueError("two bounds are expected, the lower at most 1 and the upper at least 1, e.g. [0.5, 2.0]; or none")
        return bounds


def check_loss(loss: Loss, advantage_kind: str) -> None:
    """Raise ValueError for keys that contradict each other."""
    if loss.correction_lower > loss.correction_upper:
        raise ValueError(
            f"loss.correction_lower = {loss.correction_lower} exceeds loss.correction_upper = {loss.correction_upper}: swap them"
        )
    if loss.policy == "dr_grpo" and (advantage_kind != "centered" or loss.denominator != "constant"):
        raise ValueError(
            f'loss.policy = "dr_grpo" is defined for advantage.kind = "centered" and loss.denominator = "constant", not '
            f'"{advantage_kind}" and "{loss.denominator}": set both, and loss.denominator_tokens to what a mini-batch is to be '
            "divided by, e.g. its completions x sampling.max_tokens"
        )
    if loss.denominator == "constant" and loss.denominator_tokens == 0:
        raise ValueError('loss.denominator = "constant" needs loss.denominator_tokens > 0')
