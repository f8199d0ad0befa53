"""Priorities of groups after a training step: what remains to be learnt from them. Pure.

Guarantees: the same for any number of ranks and any packing, because completions are summed without rounding (`math.fsum`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from services.algorithm.sampling_weights import sampling_weight
from services.trainer import losses
from services.trainer.step.batches import PackedRow

Parts = dict[str, list[float]]
"""Maps each group to what each of its completions contributes."""


def of_rows(rows: Sequence[PackedRow], learning: Sequence[Tensor]) -> Parts:
    """Return what the completions of these rows contribute: |A| times the share of counted tokens that remain to be learnt.

    `learning` are the rows' `losses.LossOutput.learning`, [R] bool each. A completion without a counted token, masked or not,
    contributes 0.
    """
    parts: Parts = defaultdict(list)
    for row, mask in zip(rows, learning, strict=True):
        count = len(row.samples)
        left = torch.bincount(row.sample_of_token, row.advantages.abs().double() * mask, minlength=count)
        counted = torch.bincount(row.sample_of_token, losses.counted(row.behaviour).double(), minlength=count)
        for (payload, _), priority in zip(row.samples, (left / counted.clamp(min=1)).tolist(), strict=True):
            parts[group_of(payload)].append(priority)
    return dict(parts)


def join(of_ranks: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the priority of each group, the sum over its completions on all ranks, sorted by name."""
    parts: Parts = defaultdict(list)
    for of_rank in of_ranks:
        for group, of_completions in of_rank.items():
            parts[group] += of_completions
    return {group: math.fsum(parts[group]) for group in sorted(parts)}


def sampling_weights(priorities: Mapping[str, float], exponent: float) -> dict[str, float]:
    """Return the weights that replay samples the groups with."""
    return {group: sampling_weight(priority, exponent) for group, priority in priorities.items()}


def group_of(payload: str) -> str:
    """Return the name of the group of a payload, "<group>.<fence>"."""
    return payload.rpartition(".")[0]
