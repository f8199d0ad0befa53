"""Divides a segment into the policy's messages and those it read in between: its turns, as a conversation. Pure."""

from __future__ import annotations

import math
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


def read_parts(payload: Payload, place: int, tokens: list[int], reader: TextReader) -> list[CompletionPart]:
    """Return the parts of the segment at a place, whose tokens these are; what cannot be true of it is left out."""
    read = _rows(payload.tool_spans, 3, place)
    turns = {int(end): (waited, sampled) for _, end, waited, sampled in _rows(payload.turns, 4, place)}
    edges = {0, len(tokens), *turns} | {int(edge) for _, start, end in read for edge in (start, end)}
    parts = list[CompletionPart]()
    for start, end in pairwise(sorted(edge for edge in edges if 0 <= edge <= len(tokens))):
        sampled = not any(first <= start and end <= last for _, first, last in read)
        waited_s, sampled_s = turns.get(end, (None, None)) if sampled else (None, None)
        passage = read_passage(tokens[start:end], reader)
        parts.append(CompletionPart(sampled=sampled, passage=passage, waited_s=waited_s, sampled_s=sampled_s))
    return parts


def _rows(column: np.ndarray, width: int, place: int) -> list[list[float]]:
    """Return the rows of a segment, or none if the column is damaged; a row that has what is no number is left out."""
    if column.shape[1:] != (width,) or column.dtype.kind not in "iuf":
        return []
    return [row for row in column.tolist() if row[0] == place and all(map(math.isfinite, row))]
