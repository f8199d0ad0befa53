"""Priorities of groups after a training step: what remains to be learnt from them. Pure.

Guarantees: the same for any number of ranks and any packing, because segments and completions are summed without rounding
(`math.fsum`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from services.trainer import losses
from services.trainer.step.batches import PackedRow

Parts = dict[tuple[str, int], list[tuple[float, float]]]
"""Maps each completion, (payload, rollout), to its segments': the sum of |A| over tokens that remain to be learnt, and the number
of counted tokens."""


def of_rows(rows: Sequence[PackedRow], learning: Sequence[Tensor]) -> Parts:
    """Return what the segments of these rows contribute to their completions.

    `learning` are the rows' `losses.LossOutput.learning`, [R] bool each.
    """
    parts: Parts = defaultdict(list)
    for row, mask in zip(rows, learning, strict=True):
        count = len(row.samples)
        left = torch.bincount(row.sample_of_token, row.advantages.abs().double() * mask, minlength=count)
        counted = torch.bincount(row.sample_of_token, losses.counted(row.behaviour).double(), minlength=count)
        for completion, pair in zip(row.samples, zip(left.tolist(), counted.tolist(), strict=True), strict=True):
            parts[completion].append(pair)
    return dict(parts)


def join(of_ranks: Iterable[Parts]) -> dict[str, float]:
    """Return the priority of each group, the sum over its completions on all ranks, sorted by name.

    A completion contributes |A| times the share of its counted tokens that remain to be learnt. One without a counted token,
    masked or not, contributes 0.
    """
    parts: Parts = defaultdict(list)
    for of_rank in of_ranks:
        for completion, of_segments in of_rank.items():
            parts[completion] += of_segments
    of_groups: dict[str, list[float]] = defaultdict(list)
    for (payload, _), of_segments in parts.items():
        left, counted = map(math.fsum, zip(*of_segments, strict=True))
        of_groups[group_of(payload)].append(left / max(counted, 1.0))
    return {group: math.fsum(of_groups[group]) for group in sorted(of_groups)}


def group_of(payload: str) -> str:
    """Return the name of the group of a payload, "<group>.<fence>"."""
    return payload.rpartition(".")[0]
