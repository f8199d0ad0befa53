"""Metrics of the packed rows of a step: how full they are, and how many of its groups have a gradient. No clock, no Redis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.protocol.messages import RankPlan, Sample


def of_rows(ranks: Sequence[RankPlan], row_tokens: int, wanted: int) -> dict[str, float]:
    """Return metrics of the rows of all ranks, none without a segment.

    `row_tokens`: budget of a row. `wanted`: groups of a full step.
    """
    rows = [row for rank in ranks for row in rank.rows]
    if not any(rows):
        return {}
    moving = {sample.payload for row in rows for sample in row if sample.trained_tokens and sample.advantage and sample.weight}
    return {
        "rows/train/packed_ratio": sum(map(tokens, rows)) / (len(rows) * row_tokens),
        "groups/train/real_batch_size_ratio": len(moving) / wanted,
    }


def tokens(row: Iterable[Sample]) -> int:
    """Return the tokens of a row, which holds a context once for all segments that share it."""
    contexts: dict[tuple[str, int], int] = {}
    own = 0
    for sample in row:
        contexts[sample.payload, sample.context] = sample.context_tokens
        own += sample.tokens - sample.context_tokens
    return own + sum(contexts.values())
