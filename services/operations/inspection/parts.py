"""Divides a segment into the policy's messages and those it read in between: its turns, as a conversation. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from services.operations.inspection.answer import Answer
from services.operations.inspection.text import Passage, TextReader, read_passage
from services.protocol.payloads import Payload


class CompletionPart(Answer):
    """Consecutive tokens of a segment that are all the policy's, or all its environment's."""

    sampled: bool
    """Whether the policy sampled them; otherwise it read them, such as a tool's output."""
    passage: Passage
    waited_s: float | None = None
    """Seconds that the environment took before this turn of the policy; null outside of environments."""
    sampled_s: float | None = None
    """Seconds that the policy took; null outside of environments."""


@dataclass(frozen=True)
class _Piece:
    """A part by its tokens, [start, end) within the segment."""

    start: int
    end: int
    sampled: bool
    waited_s: float | None = None
    sampled_s: float | None = None


def read_parts(payload: Payload, place: int, tokens: list[int], reader: TextReader) -> list[CompletionPart]:
    """Return the parts of the segment at a place, whose tokens these are; what cannot be true of it is left out."""
    return [
        CompletionPart(
            sampled=piece.sampled,
            passage=read_passage(tokens[piece.start : piece.end], reader),
            waited_s=piece.waited_s,
            sampled_s=piece.sampled_s,
        )
        for piece in _pieces(payload, place, len(tokens))
    ]


def _pieces(payload: Payload, place: int, length: int) -> list[_Piece]:
    read = _rows(payload.tool_spans, 3, place)
    turns = {int(end): (waited, sampled) for _, end, waited, sampled in _rows(payload.turns, 4, place)}
    edges = {0, length, *turns} | {int(edge) for _, start, end in read for edge in (start, end)}
    between = sorted(edge for edge in edges if 0 <= edge <= length)
    pieces: list[_Piece] = []
    for start, end in pairwise(between):
        sampled = not any(first <= start and end <= last for _, first, last in read)
        waited_s, sampled_s = turns.get(end, (None, None)) if sampled else (None, None)
        pieces.append(_Piece(start, end, sampled, waited_s, sampled_s))
    return pieces


def _rows(column: np.ndarray, width: int, place: int) -> list[list[float]]:
    """Return the rows of a segment, or none if the column is damaged; a row that has what is no number is left out."""
    if column.shape[1:] != (width,) or column.dtype.kind not in "iuf":
        return []
    return [row for row in column.tolist() if row[0] == place and all(map(math.isfinite, row))]
