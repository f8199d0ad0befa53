"""The loss of a row: policy term, correction, KL and entropy bonus, put together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.config.loss import Loss
from services.trainer.losses.correction import correct, counted
from services.trainer.losses.custom import find
from services.trainer.losses.kl import reference_kl
from services.trainer.losses.measures import measure
from services.trainer.losses.tokens import Tokens


@dataclass(frozen=True)
class LossOutput:
    """Loss of a row and what to report of it. `sums` and `maxima` are over its counted tokens (`measures.py`)."""

    loss: Tensor  # scalar
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    learning: Tensor  # [R] bool: counted, and the policy has not yet moved past the clip's bounds since the token was sampled


def compute(tokens: Tokens, config: Loss, denominator: float) -> LossOutput:
    """(sum over counted tokens of weight * share * (c * policy loss + kl_beta * KL - entropy_coefficient * H)) / denominator.

    c = the correction's weight; KL and entropy are not corrected. weight = the importance weight of the token's group
    (Schaul et al. 2016, section 3.4); the denominator does not know it. share: see denominators.py. With no token the loss is
    0 and still has a gradient (of zeros), so that an empty row takes part in backward.
    """
    keep = counted(tokens.behaviour)
    tokens = tokens.only(keep)
    if config.from_behaviour:
        tokens = replace(tokens, old=tokens.behaviour)
    term = find(config.policy)(tokens, config)
    correction = correct(tokens, config)
    loss = correction.weights * term.loss
    if config.kl_beta > 0:
        loss = loss + config.kl_beta * reference_kl(tokens, config.kl_estimator)
    if config.entropy_coefficient > 0:
        loss = loss - config.entropy_coefficient * tokens.entropy
    total = (tokens.weights * tokens.shares * loss).sum() / denominator
    sums, maxima = measure(tokens, config, term, correction, total)
    learning = keep.clone()
    learning[keep] = ~_learnt(tokens, config)
    return LossOutput(total, sums, maxima, learning)


@torch.no_grad()
def _learnt(tokens: Tokens, config: Loss) -> Tensor:
    """Where the policy loss clips when it starts from mu, [R] bool: how far the policy has moved since a token was sampled,
    whenever that was. `old` would not tell: it is the policy of this very step."""
    term = find(config.policy)(replace(tokens, old=tokens.behaviour), config)
    return term.clipped_low | term.clipped_high
