"""Describes the effective loss at the start of a run: keys may be set and still have no effect in their combination."""

from __future__ import annotations

import json
from collections.abc import Iterator

from services.config.loss import CLIPS, POLICIES, PUBLISHED
from services.config.root import RunConfig


def clips(config: RunConfig, mini_batches: int) -> bool:
    """Return whether the clip bounds can act in a step of that number of mini-batches. Assume it of a custom loss."""
    return config.from_behaviour or mini_batches > 1 or config.loss.policy not in POLICIES


def loss_in_words(config: RunConfig) -> Iterator[str]:
    """Describe the effective loss, one sentence at a time."""
    loss, mini_batches = config.loss, config.trainer.mini_batches
    if not clips(config, mini_batches):
        keys = ", ".join(f"loss.{key}" for key in CLIPS if key in POLICIES[loss.policy])
        yield (
            f"The ratio is exactly 1 (it starts from the weights at the start of the step, of one mini-batch): {keys} never act, "
            f'and the gradient of loss.policy = "{loss.policy}" is that of -A log p, as for any other policy loss with the same '
            "advantages and denominator."
        )
        if config.admission.max_staleness:
            yield (
                "Groups may be stale, and only the correction (loss.correction_upper) accounts for that: leave the keys of the "
                "correction at their defaults for a ratio to the policy that sampled."
            )
    elif config.from_behaviour:
        yield (
            f'loss.policy = "{loss.policy}" takes its ratio to the policy that sampled the token; it contains the difference '
            "between engine and trainer, so there is no separate correction."
        )
    else:
        yield (
            f'loss.policy = "{loss.policy}" takes its ratio to the policy at the start of the step, over {mini_batches} '
            f"mini-batches; loss.correction_upper = {loss.correction_upper} bounds the correction for the policy that sampled."
        )
    if loss.policy == "grpo" and loss.denominator != "sequence":
        yield (
            f'loss.denominator = "{loss.denominator}", whereas the GRPO paper first takes the mean of each response: '
            'loss.denominator = "sequence".'
        )
    for key, published in PUBLISHED.get(loss.policy, {}).items():
        if (given := getattr(loss, key)) != published:
            paper = loss.policy.partition("_")[0].upper()
            yield f"loss.{key} = {json.dumps(given)}, whereas the {paper} paper has {json.dumps(published)}."
