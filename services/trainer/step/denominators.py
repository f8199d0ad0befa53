"""The divisor of a mini-batch, and each token's share where a mean of means is configured.

Guarantees: numbers are those of the written formula over all ranks, however responses are distributed. Tokens that the loss does
not count (`losses.counted`) drop out of their mean; a response or group without any counted token drops out of the number of
responses or groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer import losses
from services.trainer.step.batches import PackedRow
from services.trainer.step.priorities import group_of


@dataclass(frozen=True)
class TokenCounts:
    """Counts of one response: its tokens in the loss as planned, and counted ones."""

    planned: int = 0
    counted: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.planned + other.planned, self.counted + other.counted)


Counts = Mapping[tuple[str, int], TokenCounts]
"""Counts of a mini-batch by (payload, rollout). Segments of a rollout are one response, whichever rows and ranks have them."""


def count_tokens(rows: Iterable[PackedRow]) -> dict[tuple[str, int], TokenCounts]:
    """Count the responses in these rows of one rank and mini-batch."""
    found: dict[tuple[str, int], TokenCounts] = {}
    for row in rows:
        planned, counted = (of.tolist() for of in _of_segments(row))
        for response, of_plan, of_loss in zip(row.samples, planned, counted, strict=True):
            found[response] = found.get(response, TokenCounts()) + TokenCounts(of_plan, of_loss)
    return found


def join(of_ranks: Iterable[Counts]) -> dict[tuple[str, int], TokenCounts]:
    """Join the counts of a mini-batch over all ranks."""
    found: dict[tuple[str, int], TokenCounts] = {}
    for of_rank in of_ranks:
        for response, one in of_rank.items():
            found[response] = found.get(response, TokenCounts()) + one
    return found


def excluded(responses: Counts) -> int:
    """Return the number of tokens of a mini-batch that the loss does not count."""
    return sum(one.planned - one.counted for one in responses.values())


def divisor(planned: float, responses: Counts, kind: str) -> float:
    """Return the divisor of a mini-batch: the plan's, less the tokens, responses or groups that drop out.

    At least 1, except that a constant divisor is returned unchanged.
    """
    match kind:
        case "token":
            return max(planned - excluded(responses), 1.0)
        case "sequence":
            return max(planned - _lost(responses.values()), 1.0)
        case "group":
            return max(planned - _lost(_of_groups(responses).values()), 1.0)
    return planned


def shares(rows: Sequence[PackedRow], responses: Counts, kind: str) -> list[Tensor]:
    """Return the factor of each token's loss, [R] float32 for each row: 1 over the counted tokens of its response or group,
    otherwise 1.
    """
    if kind not in ("sequence", "group"):
        return [torch.ones(len(row.targets)) for row in rows]
    of_groups = _of_groups(responses)
    found: list[Tensor] = []
    for row in rows:
        of = [responses[one] if kind == "sequence" else of_groups[group_of(one[0])] for one in row.samples]
        counts = torch.tensor([one.counted for one in of], dtype=torch.int64)
        found.append(1 / counts.clamp(min=1)[row.sample_of_token].float())
    return found


def _of_groups(responses: Counts) -> dict[str, TokenCounts]:
    found: dict[str, TokenCounts] = {}
    for (payload, _), one in responses.items():
        found[group_of(payload)] = found.get(group_of(payload), TokenCounts()) + one
    return found


def _lost(counts: Iterable[TokenCounts]) -> int:
    """Return how many have tokens in the loss, none of which count."""
    return sum(one.planned > 0 and one.counted == 0 for one in counts)


def _of_segments(row: PackedRow) -> tuple[Tensor, Tensor]:
    """Return the tokens in the loss of each segment of the row, [n] int64: all, and the counted ones."""
    owners, size = row.sample_of_token, len(row.samples)
    return torch.bincount(owners, minlength=size), torch.bincount(owners[losses.counted(row.behaviour)], minlength=size)
