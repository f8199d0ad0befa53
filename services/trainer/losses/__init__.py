"""The loss of a training step, from policy losses to reported metrics.

Guarantees: the value is the sum over the given tokens divided by the given denominator and depends on nothing else. So losses of
rows add up, and the gradient of a step is the same however tokens are spread over rows, micro-batches and ranks. Sequence-level
operations act per response; a row holds several responses, each whole. Tokens with a non-finite behaviour logprob contribute
nothing. With what the host knows of the row, its counted tokens and the number of its responses, nothing waits for the device.
"""

from services.trainer.losses.correction import correct, counted, counted_places
from services.trainer.losses.custom import check, find
from services.trainer.losses.objective import LossOutput, compute, has_gradient
from services.trainer.losses.tokens import PolicyTerm, Tokens, reference_kl

__all__ = [
    "LossOutput",
    "PolicyTerm",
    "Tokens",
    "check",
    "compute",
    "correct",
    "counted",
    "counted_places",
    "find",
    "has_gradient",
    "reference_kl",
]
