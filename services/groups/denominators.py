"""The denominator of a mini-batch, by what it counts. Shared by dataprep, which plans it, and the trainer, which drops groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from services.protocol.messages import Sample


def denominator(samples: Sequence[Sample], kind: Literal["token", "constant", "sequence", "group"], group_tokens: int) -> float:
    """Return the denominator of the mini-batch of these samples over all ranks, which are of whole groups; at least 1.

    It is the number of tokens, rollouts or groups in the loss, or `group_tokens` for each group, in the loss or not.
    """
    in_loss = [sample for sample in samples if sample.trained_tokens]
    match kind:
        case "sequence":
            count = len({sample.response for sample in in_loss})
        case "group":
            count = len({sample.payload for sample in in_loss})
        case "constant":
            count = len({sample.payload for sample in samples}) * group_tokens
        case "token":
            count = sum(sample.trained_tokens for sample in in_loss)
    return float(max(1, count))
