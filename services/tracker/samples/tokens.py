"""What the tokens of a group give for its rollouts: texts, logprobs and gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from services.operations.inspection.text import TextReader
from services.protocol.messages import Header
from services.protocol.payloads import Payload

Gaps = Mapping[tuple[str, int], np.ndarray]
"""Payload and place of a segment in it -> logprob gaps of the segment's sampled tokens (services/protocol/logprob_gaps.py)."""


class GroupTokens:
    """The tokens of a group, rollout by rollout."""

    def __init__(
        self, header: Header, payload: Payload, places: Sequence[Sequence[int]] | None, reader: TextReader, gaps: Gaps
    ) -> None:
        """Raise ValueError or IndexError for columns that do not fit together. `places`: those of each rollout's segments; None:
        segment i is rollout i.
        """
        self._header, self._payload, self._reader = header, payload, reader
        self._ends = _ends(payload)
        if sorted(header.rollout) != header.rollout or min(header.rollout, default=0) < 0:
            raise ValueError("the segments of a rollout do not follow each other")
        texts = [reader.text(payload.tokens[start:end].tolist()) for start, end in pairwise(self._ends)]
        self.lengths: list[int] = payload.lengths.tolist()
        self.completions, self.segments = texts, list[Any]()
        if places is not None:
            self.lengths = [sum(self.lengths[place] for place in own) for own in places]
            self.completions = [_joined([texts[place] for place in own]) for own in places]
            self.segments = self._segments(places, texts)
        elif len(payload.context_lengths):
            self.segments = self._segments([[place] for place in range(len(texts))], texts)
        self.notes = [*payload.notes, *[""] * (len(self.lengths) - len(payload.notes))]
        self.tokens, self.logprobs, self.gaps = payload.tokens, payload.logprobs, self._gaps(gaps)
        """Of all rollouts, one after the other, [sum of `lengths`]; gaps are NaN where there is none, None: no token has one."""

    def _segments(self, places: Sequence[Sequence[int]], texts: Sequence[str | None]) -> list[list[dict[str, Any]] | None]:
        """Return the segments of each rollout that has several, or its own contexts; None for the others."""
        header, contexts = self._header, self._payload.own_contexts
        return [
            [
                {
                    "context": self._reader.text(contexts[place].tolist()) if len(contexts[place]) else None,
                    "text": texts[place], "context_tokens": header.context_sizes[place], "length": header.lengths[place],
                    "oldest": header.oldest[place], "newest": header.newest[place],
                }
                for place in own
            ]
            if len(own) > 1 or any(len(contexts[place]) for place in own)
            else None
            for own in places
        ]  # fmt: skip

    def _gaps(self, known: Gaps) -> np.ndarray | None:
        payload, name, ends = self._payload, self._header.payload, self._ends
        found = {place: gaps for place in range(len(payload.lengths)) if (gaps := known.get((name, place))) is not None}
        if not found:
            return None
        if not len(payload.tool_spans) and list(map(len, found.values())) == payload.lengths.tolist():
            return np.concatenate(list(found.values()))
        whole, sampled = np.full(len(payload.tokens), np.nan, np.float32), np.ones(len(payload.tokens), bool)
        for place, start, end in payload.tool_spans.tolist():
            sampled[ends[place] + start : ends[place] + end] = False
        for place, gaps in found.items():
            own, chosen = whole[ends[place] : ends[place + 1]], sampled[ends[place] : ends[place + 1]]
            if len(gaps) == chosen.sum():
                own[chosen] = gaps
        return whole


def _ends(payload: Payload) -> list[int]:
    """Return where segments begin, and where the last one ends."""
    if payload.lengths.ndim != 1 or (payload.lengths < 0).any():
        raise ValueError(f"lengths {payload.lengths.tolist()}")
    ends = [0, *accumulate(payload.lengths.tolist())]
    for column, kind in ((payload.tokens, np.int32), (payload.logprobs, np.float32)):
        if column.shape != (ends[-1],) or column.dtype != kind:
            raise ValueError(f"tokens or logprobs of shape {column.shape} and type {column.dtype}, not {ends[-1]}")
    return ends


def _joined(texts: Sequence[str | None]) -> str | None:
    """Return the texts as one; None if one of them is unknown."""
    return None if None in texts else "".join(text or "" for text in texts)
