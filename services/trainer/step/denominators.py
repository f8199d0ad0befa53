"""The divisor of a mini-batch, and each token's share where a mean of means is configured.

Guarantees: numbers are those of the written formula over all ranks, however responses are distributed. Tokens that the loss does
not count (`losses.counted`) drop out of their mean; a response or group without any counted token drops out of the number of
responses or groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer import losses
from services.trainer.step.batches import PackedRow
from services.trainer.step.priorities import group_of


@dataclass(frozen=True)
class TokenCounts:
    """Counts of one group: response tokens in the loss as planned, counted tokens, and responses without a counted token."""

    planned: int = 0
    counted: int = 0
    lost_responses: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.planned + other.planned, self.counted + other.counted, self.lost_responses + other.lost_responses)


def count_tokens(rows: Iterable[PackedRow]) -> dict[str, TokenCounts]:
    """Count the groups in these rows of one rank and mini-batch."""
    found: dict[str, TokenCounts] = {}
    for row in rows:
        planned, counted = (of.tolist() for of in _of_responses(row))
        for (payload, _), of_plan, of_loss in zip(row.samples, planned, counted, strict=True):
            group = group_of(payload)
            one = TokenCounts(of_plan, of_loss, int(of_plan > 0 and of_loss == 0))
            found[group] = found.get(group, TokenCounts()) + one
    return found


def join(of_ranks: Iterable[Mapping[str, TokenCounts]]) -> dict[str, TokenCounts]:
    """Join the counts of a mini-batch over all ranks."""
    found: dict[str, TokenCounts] = {}
    for of_rank in of_ranks:
        for group, one in of_rank.items():
            found[group] = found.get(group, TokenCounts()) + one
    return found


def excluded(groups: Mapping[str, TokenCounts]) -> int:
    """Return the number of tokens of a mini-batch that the loss does not count."""
    return sum(one.planned - one.counted for one in groups.values())


def divisor(planned: float, groups: Mapping[str, TokenCounts], kind: str) -> float:
    """Return the divisor of a mini-batch: the plan's, less the tokens, responses or groups that drop out.

    At least 1, except that a constant divisor is returned unchanged.
    """
    match kind:
        case "token":
            return max(planned - excluded(groups), 1.0)
        case "sequence":
            return max(planned - sum(one.lost_responses for one in groups.values()), 1.0)
        case "group":
            return max(planned - sum(one.planned > 0 and one.counted == 0 for one in groups.values()), 1.0)
    return planned


def shares(row: PackedRow, groups: Mapping[str, TokenCounts], kind: str) -> Tensor:
    """Return the factor of each token's loss, [R] float32: 1 over the counted tokens of its response or group, otherwise 1."""
    if kind == "sequence":
        counts = _of_responses(row)[1]
    elif kind == "group":
        counts = torch.tensor([groups[group_of(payload)].counted for payload, _ in row.samples], dtype=torch.int64)
    else:
        return torch.ones(len(row.targets))
    return 1 / counts.clamp(min=1)[row.sample_of_token].float()


def _of_responses(row: PackedRow) -> tuple[Tensor, Tensor]:
    """Return the tokens in the loss of each response of the row, [n] int64: all, and the counted ones."""
    owners, size = row.sample_of_token, len(row.samples)
    return torch.bincount(owners, minlength=size), torch.bincount(owners[losses.counted(row.behaviour)], minlength=size)
