"""The policy loss: which one, its train/infer correction, its denominator, and which of these work together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import Field, field_validator, model_validator

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
"""Policy losses by name, and which of `CLIPS` each reads. A custom loss may read all of them."""

CORRECTION = (
    "correction_lower",
    "correction_upper",
    "correction_token_mask",
    "correction_sequence_mask",
    "correction_variation_mask",
)
"""Keys of the train/infer correction."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "denominator": "sequence"},
}
"""Defaults of a policy loss that differ from those of the section: with the others it would not be what its paper describes. The
ratio of a response moves far less than that of a token (Zheng et al. 2025, section 5.1)."""

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Loss(Section):
    """The policy loss (formulas: docs/semantics.md)."""

    policy: str = "dapo"
    """`grpo` (symmetric clip), `dapo` (clip-higher), `dr_grpo`, `cispo`, `gspo`, `reinforce`, `dppo`, or
    `package.module:function` for a custom loss (docs/semantics.md)."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Lower clip distance of the ratio; for `grpo` and `dr_grpo` also the upper one. Unused by `cispo` and `dppo`. `gspo`: 3e-4
    by default."""
    clip_high: float = Field(default=0.272, ge=0)
    """Upper clip distance of the ratio, for `dapo`, `cispo`, `gspo` (4e-4 by default) and `reinforce`."""
    divergence: Literal["tv", "kl"] = "tv"
    """`dppo`: divergence from the generating policy, of the token against all others: total variation or Kullback-Leibler."""
    divergence_bound: float = Field(default=0.1, gt=0)
    """`dppo`: a token whose divergence exceeds this is masked if the update would increase it further."""
    old: Literal["auto", "recompute", "behaviour"] = "auto"
    """Policy in the ratio's denominator. `recompute`: the weights at the start of the step; with one mini-batch they come from
    the regular forward pass, so that the ratio is exactly 1 and nothing is clipped; with more, from an extra pass. `behaviour`:
    the generators' logprobs, which `dppo` always uses. `auto`: `behaviour` in an asynchronous run with one mini-batch and no
    correction keys, otherwise `recompute`."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy. With 0 no reference is loaded, and groups of equal rewards, which
    then have no gradient, are trained without a backward pass. Most of the losses are published without it; GRPO's paper has 0.04
    (DeepSeekMath, section 4.2)."""
    kl_estimator: Literal["k1", "k2", "k3", "k1_weighted"] = "k3"
    """Estimator of that KL (docs/semantics.md)."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus. With 0 the entropy is only reported."""
    correction_lower: float = Field(default=0.0, ge=0)
    """Lower bound of the train/infer importance weight."""
    correction_upper: float = Field(default=2.0, gt=0)
    """Upper bound of the train/infer importance weight (truncated importance sampling)."""
    correction_token_mask: list[float] = []
    """[lower, upper]: tokens whose train/infer ratio is outside get weight 0. Empty: no mask."""
    correction_sequence_mask: list[float] = []
    """[lower, upper]: responses whose geometric mean of the ratios is outside get weight 0. Empty: no mask."""
    correction_variation_mask: float = Field(default=0.0, ge=0)
    """In a response whose mean |ratio - 1| / 2 exceeds this, tokens that the update would move further get weight 0.
    0: no mask."""
    correction_max_gap: float = Field(default=0.1, ge=0)
    """Largest mean difference, in nats, between the logprobs of engine and trainer where both have the same weights: on the
    first step of each trainer process that trains no older groups. Above it the run stops, since they compute different models.
    0: no limit."""
    denominator: Literal["token", "constant", "sequence", "group"] = "token"
    """How the sum over tokens is normalised: `token`, mean over the tokens of all ranks; `constant`, divided by
    `denominator_tokens`; `sequence` (the default of `gspo`) or `group`, mean over responses or groups of their mean over
    tokens."""
    denominator_tokens: int = Field(default=0, ge=0)
    """The divisor for `denominator = "constant"`."""

    @property
    def from_behaviour(self) -> bool:
        """Whether the ratio starts from the generators' logprobs, so that no correction is needed."""
        return self.old == "behaviour" or self.policy == "dppo"

    @property
    def learns_from_advantages_alone(self) -> bool:
        """Whether a token whose advantage is 0 has no gradient. A custom loss may give it one, as do KL and entropy bonus."""
        return self.policy in POLICIES and self.kl_beta == 0 and self.entropy_coefficient == 0

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = cast("Mapping[str, Any]", values)
        return {**PUBLISHED.get(str(given.get("policy")), {}), **given}

    @field_validator("policy")
    @classmethod
    def _names_a_loss(cls, name: str) -> str:
        if name not in POLICIES and not IMPORT_PATH.fullmatch(name):
            raise ValueError(f"must be one of {', '.join(POLICIES)}, or package.module:function for a custom loss")
        return name

    @field_validator("correction_token_mask", "correction_sequence_mask")
    @classmethod
    def _lies_around_one(cls, bounds: list[float]) -> list[float]:
        if bounds and not (len(bounds) == 2 and 0 <= bounds[0] <= 1 <= bounds[1]):
            raise ValueError("must be empty or two bounds, the lower at most 1 and the upper at least 1, e.g. [0.5, 2.0]")
        return bounds


def settle(loss: Loss, max_staleness: int, mini_batches: int) -> Loss:
    """Return the loss with `old = "auto"` replaced by its value in a run."""
    if loss.old != "auto":
        return loss
    corrected = any(getattr(loss, key) != Loss.model_fields[key].default for key in CORRECTION)
    moves = max_staleness > 0 and mini_batches == 1 and not corrected
    return loss.model_copy(update={"old": "behaviour" if moves else "recompute"})


def check_loss(loss: Loss, advantage_kind: str) -> None:
    """Raise ValueError for keys that contradict each other."""
    if loss.correction_lower > loss.correction_upper:
        raise ValueError(
            f"loss.correction_lower = {loss.correction_lower} exceeds loss.correction_upper = {loss.correction_upper}: swap them"
        )
    if loss.policy == "dr_grpo" and (advantage_kind != "centered" or loss.denominator != "constant"):
        raise ValueError(
            f'loss.policy = "dr_grpo" is defined for advantage.kind = "centered" and loss.denominator = "constant", not '
            f'"{advantage_kind}" and "{loss.denominator}": set both, and set loss.denominator_tokens to the divisor of a '
            "mini-batch, e.g. its completions x sampling.max_tokens"
        )
    if loss.denominator == "constant" and loss.denominator_tokens == 0:
        raise ValueError('loss.denominator = "constant" needs loss.denominator_tokens > 0')
