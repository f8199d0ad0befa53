"""Packing responses into rows of a token budget.

A prompt lies in a row once for all responses of its group that stand there. So they are packed in the order of groups, and what
that leaves over goes into the gaps; only where this needs more rows than longest first, it is longest first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import groupby
from math import ceil
from typing import NamedTuple

SLACK = (0.0, 0.01, 0.03, 0.1)
"""How much over the mean a row may hold, tried in turn, where there are more rows than it takes: even rows take even time."""
LAID_OUT = 2
"""Tokens of a row over its budget when a prompt counts for each response: that many keys and values attention lays out."""


class Response(NamedTuple):
    """What packing knows of one."""

    group: int
    prompt: int
    """Tokens of its prompt, which its group shares."""
    tokens: int
    """Tokens of the prompt and the response."""


def pack(shares: Sequence[Sequence[Response]], budget: int) -> list[list[list[int]]]:
    """[share][row] -> places of its responses, which are in the order of groups and none longer than `budget`. Every share gets
    equally many rows, some of which may be empty. None is over the budget, nor over `LAID_OUT` times that with every response
    behind a prompt of its own."""
    lower = max(1, *(_least(share, budget) for share in shares))
    if packed := _all_together(shares, budget, lower):
        return packed
    tokens = [[response.tokens for response in share] for share in shares]
    fewest = max(1, *(len(_fewest(of, budget)) for of in tokens))
    more = 1
    while lower + more <= fewest:
        if packed := _all_together(shares, budget, lower + more):
            return packed
        more *= 2
    return [_apart(of, budget, fewest) for of in tokens]


def _least(responses: Sequence[Response], budget: int) -> int:
    """Rows that they fill to the brim."""
    return max(-(-_tokens(responses) // budget), -(-sum(response.tokens for response in responses) // (LAID_OUT * budget)))


def _all_together(shares: Sequence[Sequence[Response]], budget: int, rows: int) -> list[list[list[int]]]:
    """Every share in so many rows, evenly filled if that succeeds; empty if one does not fit."""
    full: list[list[list[int]]] = []
    for share in shares:
        if (packed := _together(share, budget, budget, rows)) is None:
            return []
        full.append(packed)
    return [_even_together(share, budget, rows) or packed for share, packed in zip(shares, full, strict=True)]


def _even_together(responses: Sequence[Response], budget: int, rows: int) -> list[list[int]] | None:
    longest, mean = max((response.tokens for response in responses), default=0), _tokens(responses) / rows
    limits = (max(longest, ceil(mean * (1 + slack))) for slack in SLACK)
    packed = (_together(responses, limit, budget, rows) for limit in limits if limit < budget)
    return next((found for found in packed if found is not None), None)


def _apart(tokens: Sequence[int], budget: int, rows: int) -> list[list[int]]:
    """Longest first, evenly filled if that succeeds, else in as few rows as need be."""
    packed = _even(tokens, budget, rows)
    if packed is None:
        packed = _fewest(tokens, budget)
    return packed + [[] for _ in range(rows - len(packed))]


def _tokens(responses: Sequence[Response]) -> int:
    """Of all responses, in the order of groups, and of every prompt once."""
    prompts = {response.group: response.prompt for response in responses}
    return sum(prompts.values()) + sum(response.tokens - response.prompt for response in responses)


def _together(responses: Sequence[Response], limit: int, budget: int, rows: int) -> list[list[int]] | None:
    """In rows of up to `limit` tokens. Group after group: of each, longest first, what fits into the row begun last, the others
    into the next. What is left when no row is, longest first into the fullest row that still holds it; None as soon as one
    does not fit."""
    packed: list[list[int]] = [[] for _ in range(rows)]
    free, room = [limit] * rows, [LAID_OUT * budget] * rows
    row, left = 0, list[int]()
    for _, members in groupby(range(len(responses)), key=lambda i: responses[i].group):
        waiting = sorted(members, key=lambda i: (-responses[i].tokens, i))
        while waiting and row < rows:
            shared, others = 0, []
            for i in waiting:
                tokens = responses[i].tokens
                if tokens - shared <= free[row] and tokens <= room[row]:
                    packed[row].append(i)
                    free[row] -= tokens - shared
                    room[row] -= tokens
                    shared = responses[i].prompt
                else:
                    others.append(i)
            waiting = others
            row += bool(others)
        left += waiting
    gaps = sorted((min(pair), row) for row, pair in enumerate(zip(free, room, strict=True))) if left else []
    for i in sorted(left, key=lambda i: (-responses[i].tokens, i)):
        at = bisect_left(gaps, (responses[i].tokens, -1))
        if at == len(gaps):
            return None
        space, row = gaps.pop(at)
        packed[row].append(i)
        insort(gaps, (space - responses[i].tokens, row))
    return packed


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
