"""The loss of a row: combines policy term, correction, KL and entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.config.loss import DPPO, Loss
from services.trainer.losses.correction import correct, counted_places
from services.trainer.losses.custom import find
from services.trainer.losses.measures import measure
from services.trainer.losses.tokens import PolicyTerm, Tokens, reference_kl


@dataclass(frozen=True)
class LossOutput:
    """Holds the loss of a row and its statistics. `sums` and `maxima` are over its counted tokens (`measures.py`)."""

    loss: Tensor  # scalar
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    learning: Tensor  # [R] bool: counted, and the policy has not moved past the clip bounds since the token was sampled


def compute(
    tokens: Tokens, config: Loss, denominator: float, places: Tensor | None = None, from_behaviour: bool = False
) -> LossOutput:
    """Compute the loss of a row:

    (sum over counted tokens of weight * share * (c * policy loss + kl_beta * KL - entropy_coefficient * H)) / denominator.

    c = the correction's weight; KL and entropy are not corrected. weight = the importance weight of the token's group (Schaul et
    al. 2016, section 3.4), which the denominator ignores. share: see denominators.py. Without tokens the loss is 0 and still has
    a gradient (of zeros), so that an empty row takes part in backward.

    `places`: those of the counted tokens (`counted_places`). Without them, it waits for the device to find them.
    `from_behaviour`: whether mu takes the place of `old` (`Loss.from_behaviour`).
    """
    size = len(tokens.behaviour)
    places = counted_places(tokens.behaviour) if places is None else places
    if len(places) < size:
        tokens = tokens.only(places)
    from_behaviour = from_behaviour or config.policy in DPPO
    if from_behaviour:
        tokens = replace(tokens, old=tokens.behaviour)
    term = find(config.policy)(tokens, config)
    correction = correct(tokens, config)
    loss = correction.weights * term.loss
    if config.kl_beta > 0:
        loss = loss + config.kl_beta * reference_kl(tokens)
    if config.entropy_coefficient > 0:
        loss = loss - config.entropy_coefficient * tokens.entropy
    total = (tokens.weights * tokens.shares * loss).sum() / denominator
    sums, maxima = measure(tokens, term, correction, total, from_behaviour)
    since = term if from_behaviour else _from_behaviour(tokens, config)
    learning = ~(since.clipped_low | since.clipped_high)
    if len(places) < size:
        learning = learning.new_zeros(size).index_copy(0, places, learning)
    return LossOutput(total, sums, maxima, learning)


def has_gradient(advantages: Tensor, weights: Tensor, config: Loss) -> bool:
    """Return whether a row whose tokens have these advantages and importance weights, [R] each, changes the policy."""
    return not config.learns_from_advantages_alone or bool(((advantages != 0) & (weights != 0)).any())


@torch.no_grad()
def _from_behaviour(tokens: Tokens, config: Loss) -> PolicyTerm:
    """Return the policy loss that starts from mu.

    Its clip flags show how far the policy has moved since a token was sampled, whenever that was. `old` cannot show it, because
    it is the policy of the current step.
    """
    return find(config.policy)(replace(tokens, old=tokens.behaviour), config)
