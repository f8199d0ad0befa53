"""The policy loss: which one, its train/infer correction, its denominator, and which of these work together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from services.config.base import Section

CLIPS = ("clip_low", "clip_high")
"""Keys that only some of the policy losses read."""

POLICIES: dict[str, tuple[str, ...]] = {
    "grpo": ("clip_low",),
    "dapo": ("clip_low", "clip_high"),
    "dr_grpo": ("clip_low",),
    "cispo": ("clip_high",),
    "gspo": ("clip_low", "clip_high"),
    "reinforce": ("clip_low", "clip_high"),
    "dppo_tv": ("clip_high",),
    "dppo_kl": ("clip_high",),
}
"""Policy losses by name, and which of `CLIPS` each reads. A custom loss may read all of them."""

DPPO = ("dppo_tv", "dppo_kl")
"""Policy losses whose ratio always starts from the policy that sampled."""

CORRECTION = ("correction_upper", "correction_mask")
"""Keys of the train/infer correction."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "denominator": "sequence"},
    "dppo_tv": {"clip_high": 0.1},
    "dppo_kl": {"clip_high": 0.1},
}
"""Defaults of a policy loss that differ from those of the section: with the others it would not be what its paper describes. The
ratio of a response moves far less than that of a token (Zheng et al. 2025, section 5.1), and DPPO bounds a divergence."""

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Loss(Section):
    """The policy loss (formulas: docs/semantics.md)."""

    policy: str = "dapo"
    """`grpo` (symmetric clip), `dapo` (clip-higher), `dr_grpo`, `cispo`, `gspo`, `reinforce`, `dppo_tv`,
    `dppo_kl`, or `package.module:function` for a custom loss (docs/semantics.md)."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Lower clip distance of the ratio; for `grpo` and `dr_grpo` also the upper one. Unused by `cispo` and `dppo_…`. `gspo`: 3e-4
    by default."""
    clip_high: float = Field(default=0.272, ge=0)
    """Upper clip distance of the ratio, for `dapo`, `cispo`, `gspo` (4e-4 by default) and `reinforce`. `dppo_…` (0.1 by default):
    a token whose divergence from the policy that sampled it exceeds this is masked if the update would increase it further."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy. With 0 no reference is loaded, and groups of equal rewards, which
    then have no gradient, are trained without a backward pass. Most of the losses are published without it; GRPO's paper has 0.04
    (DeepSeekMath, section 4.2)."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus. With 0 the entropy is only reported."""
    correction_upper: float = Field(default=2.0, gt=0)
    """Upper bound of the train/infer importance weight (truncated importance sampling)."""
    correction_mask: dict[Literal["token", "sequence", "variation"], list[float]] = {}
    """What gets weight 0, as bounds by kind. `token = [lower, upper]`: tokens whose train/infer ratio is outside.
    `sequence = [lower, upper]`: responses whose geometric mean of the ratios is outside. `variation = [upper]`: in a response
    whose mean |ratio - 1| / 2 is above, the tokens that the update would move further. Empty: no mask."""
    denominator: Literal["token", "constant", "sequence", "group"] = "token"
    """How the sum over tokens is normalised: `token`, mean over the tokens of all ranks; `constant`, divided by
    sampling.group_size x sampling.max_tokens for each group; `sequence` (the default of `gspo`) or `group`, mean over responses
    or groups of their mean over tokens."""

    def from_behaviour(self, max_staleness: int, mini_batches: int) -> bool:
        """Return whether the ratio starts from the generators' logprobs in a run, so that no correction is needed.

        It does in an asynchronous run with one mini-batch and no correction keys, and always for DPPO. Otherwise it starts from
        the weights at the start of the step.
        """
        corrected = any(getattr(self, key) != Loss.model_fields[key].default for key in CORRECTION)
        return self.policy in DPPO or (max_staleness > 0 and mini_batches == 1 and not corrected)

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

    @field_validator("correction_mask")
    @classmethod
    def _has_bounds(cls, masks: dict[str, list[float]]) -> dict[str, list[float]]:
        for kind, bounds in masks.items():
            if kind == "variation":
                if len(bounds) != 1 or bounds[0] <= 0:
                    raise ValueError("`variation` must be one bound above 0, e.g. { variation = [0.2] }")
            elif not (len(bounds) == 2 and 0 <= bounds[0] <= 1 <= bounds[1]):
                raise ValueError(
                    f"`{kind}` must be two bounds, the lower at most 1 and the upper at least 1, e.g. {{ {kind} = [0.5, 2.0] }}"
                )
        return masks


def check_loss(loss: Loss, advantage_kind: str) -> None:
    """Raise ValueError for keys that contradict each other."""
    if loss.policy == "dr_grpo" and (advantage_kind != "centered" or loss.denominator != "constant"):
        raise ValueError(
            f'loss.policy = "dr_grpo" is defined for advantage.kind = "centered" and loss.denominator = "constant", not '
            f'"{advantage_kind}" and "{loss.denominator}": set both'
        )
