"""Packing responses into rows of a token budget."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def fewest_rows(tokens: Sequence[int], budget: int) -> int:
    """How few rows `pack` can do with. No entry may exceed the budget."""
    return len(_fewest(tokens, budget))


def pack(tokens: Sequence[int], budget: int, rows: int) -> list[list[int]]:
    """Places of `tokens` in `rows` rows, none over the budget: evenly filled if that succeeds, else in as few as need be.

    `rows` must be at least `fewest_rows(tokens, budget)`. Rows may be empty.
    """
    packed = _even(tokens, budget, rows)
    if packed is None:
        packed = _fewest(tokens, budget)
    assert len(packed) <= rows, "fewer rows than fewest_rows gave"
    return packed + [[] for _ in range(rows - len(packed))]


def _fewest(tokens: Sequence[int], budget: int) -> list[list[int]]:
    lower = -(-sum(tokens) // budget)
    packed = _even(tokens, budget, lower)
    if packed is not None:
        return packed
    tight = _tight(tokens, budget)
    for rows in range(lower + 1, len(tight)):
        packed = _even(tokens, budget, rows)
        if packed is not None:
            return packed
    return tight


def _longest_first(tokens: Sequence[int]) -> list[int]:
    return sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))


def _even(tokens: Sequence[int], budget: int, rows: int) -> list[list[int]] | None:
    """Each response, longest first, into the row with the fewest tokens; None as soon as one does not fit there."""
    packed: list[list[int]] = [[] for _ in range(rows)]
    heap = [(0, row) for row in range(rows)]
    for i in _longest_first(tokens):
        if not heap or heap[0][0] + tokens[i] > budget:
            return None
        filled, row = heap[0]
        packed[row].append(i)
        heapq.heapreplace(heap, (filled + tokens[i], row))
    return packed


def _tight(tokens: Sequence[int], budget: int) -> list[list[int]]:
    """Best fit, longest first: each response into the fullest row that still holds it, else into a new one."""
    packed: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for i in _longest_first(tokens):
        at = bisect_left(space, (tokens[i], -1))
        if at < len(space):
            free, row = space.pop(at)
        else:
            free, row = budget, len(packed)
            packed.append([])
        packed[row].append(i)
        insort(space, (free - tokens[i], row))
    return packed
