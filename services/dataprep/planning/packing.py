"""Packs responses into rows with a token budget. A response is a segment: a context, mostly a prompt, and what follows it.

A row holds a context once, for all responses in the row that share it. Responses are therefore packed in the order of contexts,
and the rest fill the gaps. Where this needs more rows than packing longest first, the latter is used.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import groupby
from math import ceil
from typing import NamedTuple

SLACK = (0.0, 0.01, 0.03, 0.1)
"""How far a row may exceed the mean, tried in turn, if there are more rows than necessary. Even rows take even time."""
LAID_OUT = 2
"""Limit of a row, in budgets, with the context counted for each response, as attention lays out keys and values that way."""


class Response(NamedTuple):
    """What packing needs to know of a response."""

    context: int
    """Number of its context: responses with the same number share it."""
    shared: int
    """Tokens of its context."""
    tokens: int
    """Tokens of the context and the response."""


def pack(shares: Sequence[Sequence[Response]], budget: int) -> list[list[list[int]]]:
    """Pack each share of responses into rows; return [share][row] -> places of its responses.

    Responses are in the order of contexts and none is longer than `budget`. Every share gets the same number of rows, some of
    which may be empty. No row exceeds the budget, nor `LAID_OUT` budgets if every response counts its own context.
    """
    lower = max(1, *(_least(share, budget) for share in shares))
    if packed := _all_together(shares, budget, lower):
        return packed
    apart = [_apart(share, budget) for share in shares]
    fewest, more = max(map(len, apart)), 1
    while lower + more <= fewest:
        if packed := _all_together(shares, budget, lower + more):
            return packed
        more *= 2
    return [rows + [[] for _ in range(fewest - len(rows))] for rows in apart]


def _least(responses: Sequence[Response], budget: int) -> int:
    """Return a lower bound of the number of rows: how many they would fill without gaps."""
    return max(-(-_tokens(responses) // budget), -(-sum(response.tokens for response in responses) // (LAID_OUT * budget)))


def _all_together(shares: Sequence[Sequence[Response]], budget: int, rows: int) -> list[list[list[int]]]:
    """Pack every share into `rows` rows, evenly filled if possible; return an empty list if one does not fit."""
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


def _tokens(responses: Sequence[Response]) -> int:
    """Return the tokens of all responses, given in the order of contexts, with every context counted once."""
    contexts = {response.context: response.shared for response in responses}
    return sum(contexts.values()) + sum(response.tokens - response.shared for response in responses)


def _together(responses: Sequence[Response], limit: int, budget: int, rows: int) -> list[list[int]] | None:
    """Pack into rows of up to `limit` tokens, or return None as soon as a response does not fit.

    Go through the contexts; of each, longest first, put what fits into the current row and the others into the next. Put what is
    left after the last row, longest first, into the fullest row that can hold it.
    """
    packed: list[list[int]] = [[] for _ in range(rows)]
    free, room = [limit] * rows, [LAID_OUT * budget] * rows
    row, left = 0, list[int]()
    for _, members in groupby(range(len(responses)), key=lambda i: responses[i].context):
        waiting = sorted(members, key=lambda i: (-responses[i].tokens, i))
        while waiting and row < rows:
            shared, others = 0, list[int]()
            for i in waiting:
                tokens = responses[i].tokens
                if tokens - shared <= free[row] and tokens <= room[row]:
                    packed[row].append(i)
                    free[row] -= tokens - shared
                    room[row] -= tokens
                    shared = responses[i].shared
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


def _apart(responses: Sequence[Response], budget: int) -> list[list[int]]:
    """Pack by best fit, longest first: each response goes into the fullest row that can hold it, or else into a new one."""
    packed: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for i in sorted(range(len(responses)), key=lambda i: (-responses[i].tokens, i)):
        tokens = responses[i].tokens
        at = bisect_left(space, (tokens, -1))
        if at < len(space):
            free, row = space.pop(at)
        else:
            free, row = budget, len(packed)
            packed.append([])
        packed[row].append(i)
        insort(space, (free - tokens, row))
    return packed
