"""Segments as they grow, turn by turn. Pure.

Guarantees: the ids of a segment's sampled tokens are those that the policy returned, and what stands before each of its turns is
what the policy was given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.groups.generated import Generated, Segment, TurnTime
from services.protocol.messages import Span
from services.protocol.payloads import Turn


def spans_of(turn: Turn) -> list[Span]:
    """Return the version spans of a turn's sampled tokens."""
    return [Span(int(version), int(start), int(end)) for version, start, end in turn.spans]


def segment_of(turns: Sequence[Turn]) -> Segment:
    """Return the segment of these turns. Tokens read between two turns count towards the version that sampled after them."""
    tokens: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    spans: list[Span] = []
    read: list[tuple[int, int]] = []
    times: list[TurnTime] = []
    length = 0
    for number, turn in enumerate(turns):
        between = turn.context if number else turn.context[:0]
        tokens += [between, turn.tokens]
        logprobs += [np.zeros(len(between), np.float32), turn.logprobs]
        sampled_from = length + len(between)
        if len(between):
            read.append((length, sampled_from))
        for span in spans_of(turn):
            start = sampled_from + span.start if span.start else length
            if spans and spans[-1].version == span.version:
                start = spans.pop().start
            spans.append(Span(span.version, start, sampled_from + span.end))
        length = sampled_from + len(turn.tokens)
        times.append(TurnTime(length, turn.waited_s, turn.sampled_s))
    completion = Generated(
        np.concatenate(tokens).astype(np.int32, copy=False),
        np.concatenate(logprobs).astype(np.float32, copy=False),
        spans,
        "length" if turns[-1].finish == "length" else "stop",
        tuple(read),
    )
    return Segment(completion, np.asarray(turns[0].context, np.int32), tuple(times))
