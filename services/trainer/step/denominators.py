"""The divisor of a mini-batch, and each token's share where a mean of means is configured.

Guarantees: numbers are those of the written formula over all ranks, however responses are distributed. Tokens that the loss does
not count (`losses.counted`) drop out of their mean; a response or group without any counted token drops out of the number of
responses or groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from services.trainer import losses
from services.trainer.step.batches import PackedRow
from services.trainer.step.priorities import group_of

K = TypeVar("K", str, tuple[str, int])


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
    return _added(
        (response, TokenCounts(planned, counted))
        for row in rows
        for response, planned, counted in zip(row.samples, *_of_segments(row), strict=True)
    )


def join(of_ranks: Iterable[Counts]) -> dict[tuple[str, int], TokenCounts]:
    """Join the counts of a mini-batch over all ranks."""
    return _added(pair for of_rank in of_ranks for pair in of_rank.items())


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
    return _added((group_of(payload), one) for (payload, _), one in responses.items())


def _added(pairs: Iterable[tuple[K, TokenCounts]]) -> dict[K, TokenCounts]:
    found: dict[K, TokenCounts] = {}
    for key, one in pairs:
        found[key] = found.get(key, TokenCounts()) + one
    return found


def _lost(counts: Iterable[TokenCounts]) -> int:
    """Return how many have tokens in the loss, none of which count."""
    return sum(one.planned > 0 and one.counted == 0 for one in counts)


def _of_segments(row: PackedRow) -> tuple[list[int], list[int]]:
    """Return the tokens in the loss of each segment of the row, [n]: all, and the counted ones."""
    owners, size = row.sample_of_token, len(row.samples)
    counted = owners[losses.counted(row.behaviour)]
    return torch.bincount(owners, minlength=size).tolist(), torch.bincount(counted, minlength=size).tolist()
