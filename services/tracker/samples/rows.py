"""Makes rows of the sample log from groups. Pure, except for the tokenizer.

Guarantees: a damaged header, payload or ticket never raises: its row has what can be read, and a reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from services.algorithm.advantages import Kind, advantages
from services.operations.inspection.text import TextReader
from services.operations.samples.columns import SCHEMA
from services.protocol import codec
from services.protocol.messages import Header, Ticket
from services.protocol.payloads import Payload

Gaps = Mapping[tuple[str, int], np.ndarray]
"""Payload and place of a segment in it -> logprob gaps of the segment's sampled tokens (services/protocol/logprob_gaps.py)."""
KEPT_BITS = np.uint32(0xFFFFE000)  # of a logprob: 10 bits after the point of its mantissa, some 3 digits


@dataclass(frozen=True)
class EndedGroup:
    """A group with its outcome."""

    ticket: str
    step: int
    outcome: str
    """`trained`, or as in the ledger: `filtered:<why>`, `failed:<reason>`, …"""
    incarnation: int
    header: bytes | Header
    """Its header, or of a ticket that failed in generation the ticket."""
    payload: str
    """Name of its tokens; empty: it has none."""
    payload_bytes: int = 0
    """About their size."""

    @property
    def key(self) -> tuple[str, int, str]:
        """Return what identifies it in the log."""
        return self.payload or self.ticket, self.step, self.outcome.partition(":")[0]


class LoggedRows:
    """Rows of the sample log, column by column: one for each completion of a group, or one for a group without any."""

    def __init__(self, reader: TextReader, kind: Kind, now_s: float) -> None:
        """`kind`: which advantages the groups have; `now_s`: when the rows are written, Unix seconds."""
        self._columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        self._reader, self._now_s = reader, now_s
        self._kind: Kind = kind

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._columns["group"])

    def columns(self) -> dict[str, list[Any]]:
        """Return all columns of `SCHEMA`."""
        return self._columns | _gap_columns(self._columns["gaps"])

    def add(self, group: EndedGroup, payload: Payload | None, gaps: Gaps | None = None) -> None:
        """Add the rows of a group. `gaps`: those of its step."""
        outcome, _, reason = group.outcome.partition(":")
        shared: dict[str, Any] = {
            "group": group.ticket, "step": group.step, "outcome": outcome, "reason": reason, "incarnation": group.incarnation,
            "payload": group.key[0], "logged_s": self._now_s, "notes": "",
        }  # fmt: skip
        header = group.header if isinstance(group.header, Header) else _message(group.header, Header)
        if header is None:
            self._extend(1, shared | self._of_ticket(group.header), {})
            return
        shared |= {
            "source": header.source, "generator": header.generator, "generate_s": header.generate_s, "score_s": header.score_s,
            "seq": header.seq, "prompt_tokens": header.prompt_tokens,
        }  # fmt: skip
        places = _places(header)
        own = _figures(header, places) | {"advantage": _advantages(header, self._kind)}
        if payload is not None and len(payload.lengths) == len(header.lengths):
            shared["prompt"] = self._reader.text(payload.prompt.tolist())
            with contextlib.suppress(IndexError, ValueError, TypeError):  # columns that do not fit together
                own |= _Tokens(header, payload, places, self._reader).columns(gaps or {})
        self._extend(len(header.rewards) or 1, shared, own)

    def _extend(self, count: int, shared: Mapping[str, Any], own: Mapping[str, Sequence[Any]]) -> None:
        """Add `count` rows, of values that they share and of values that each has; what is missing is null."""
        for name, column in self._columns.items():
            values = own.get(name)
            if values is None:
                column += [shared.get(name)] * count
            else:
                column += values[:count]
                column += [None] * (count - len(values))

    def _of_ticket(self, body: bytes | Header) -> dict[str, Any]:
        ticket = _message(body, Ticket)
        if ticket is None:
            return {}
        prompt = self._reader.text(ticket.prompt)
        return {"source": ticket.source, "seq": ticket.seq, "prompt": prompt, "prompt_tokens": len(ticket.prompt)}


def _places(header: Header) -> list[list[int]] | None:
    """Return the places of each rollout's segments; None: segment i is rollout i."""
    if not header.rollout:
        return None
    found: list[list[int]] = [[] for _ in header.rewards]
    for place, owner in enumerate(header.rollout):
        if 0 <= owner < len(found):
            found[owner].append(place)
    return found


def _figures(header: Header, places: Sequence[Sequence[int]] | None) -> dict[str, list[Any]]:
    """Return what the header says of each rollout."""

    def over(column: list[int], fold: Callable[[list[int]], int]) -> list[Any]:
        if places is None:
            return column
        return [fold([column[place] for place in own]) if own and own[-1] < len(column) else None for own in places]

    count = len(header.rewards)
    return {
        "sample": list(range(count)), "reward": header.rewards, "solved": header.solved, "truncated": header.truncated,
        "scores": [[(name, scores[i]) for name, scores in header.scores.items() if i < len(scores)] for i in range(count)],
        "length": over(header.lengths, sum), "tool_tokens": over(header.tool_tokens, sum),
        "turns": header.turns or [1] * count, "tool_s": header.tool_s or [0.0] * count,
        "oldest": over(header.oldest, min), "newest": over(header.newest, max),
    }  # fmt: skip


class _Tokens:
    """The tokens of a group, with their texts, logprobs and gaps."""

    def __init__(self, header: Header, payload: Payload, places: Sequence[Sequence[int]] | None, reader: TextReader) -> None:
        self._header, self._payload, self._places, self._reader = header, payload, places, reader
        self._ends: list[int] = [0, *np.cumsum(payload.lengths).tolist()]
        if self._ends[-1] != len(payload.tokens):
            raise ValueError(f"{len(payload.tokens)} tokens, not {self._ends[-1]}")
        if sorted(header.rollout) != header.rollout:
            raise ValueError("the segments of a rollout do not follow each other")

    def columns(self, gaps: Gaps) -> dict[str, list[Any]]:
        """Return texts, tokens and logprobs of each rollout."""
        payload, ids, ends = self._payload, self._payload.tokens.tolist(), self._ends
        texts = [self._reader.text(ids[start:end]) for start, end in pairwise(ends)]
        if self._places is None:
            spans, segments, completions = list(pairwise(ends)), list[Any](), texts
            if len(payload.context_lengths):
                segments = self._segments([[place] for place in range(len(texts))], texts)
        else:
            spans = [(ends[own[0]], ends[own[-1] + 1]) if own else (0, 0) for own in self._places]
            segments = self._segments(self._places, texts)
            completions = [_joined([texts[place] for place in own]) for own in self._places]
        logprobs, whole = (payload.logprobs.view(np.uint32) & KEPT_BITS).view(np.float32), self._gaps(gaps)
        return {
            "completion": completions, "segments": segments, "notes": [*payload.notes, *[""] * (len(spans) - len(payload.notes))],
            "tokens": [payload.tokens[start:end] for start, end in spans],
            "logprobs": [logprobs[start:end] for start, end in spans],
            "gaps": [] if whole is None else [whole[start:end] for start, end in spans],
        }  # fmt: skip

    def _segments(self, places: Sequence[Sequence[int]], texts: Sequence[str | None]) -> list[list[dict[str, Any]] | None]:
        """Return the segments of each rollout that has several, or contexts of its own; None for the others."""
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
        """Return the logprob gaps of all tokens, [their number] float32, NaN where there is none; None: no token has one."""
        payload, name, ends = self._payload, self._header.payload, self._ends
        found = {place: gaps for place in range(len(payload.lengths)) if (gaps := known.get((name, place))) is not None}
        if not found:
            return None
        if not len(payload.tool_spans) and [len(gaps) for gaps in found.values()] == payload.lengths.tolist():
            return np.concatenate(list(found.values()))
        whole, sampled = np.full(len(payload.tokens), np.nan, np.float32), np.ones(len(payload.tokens), bool)
        for place, start, end in payload.tool_spans.tolist():
            sampled[ends[place] + start : ends[place] + end] = False
        for place, gaps in found.items():
            own, chosen = whole[ends[place] : ends[place + 1]], sampled[ends[place] : ends[place + 1]]
            if len(gaps) == chosen.sum():
                own[chosen] = gaps
        return whole


def _gap_columns(column: Sequence[np.ndarray | None]) -> dict[str, list[Any]]:
    """Return the gaps of all rows, with the mean and the largest of their sizes; null: a row has none."""
    held = [row for row, gaps in enumerate(column) if gaps is not None and len(gaps)]
    found: dict[str, list[Any]] = {name: [None] * len(column) for name in ("gaps", "gap_mean", "gap_max")}
    if not held:
        return found
    parts: list[Any] = [column[row] for row in held]
    starts = np.cumsum([0, *map(len, parts[:-1])])
    sizes = np.abs(np.concatenate(parts))
    known = np.isfinite(sizes)
    sizes[~known] = 0.0
    counts = np.add.reduceat(known, starts, dtype=np.int64)
    means = np.add.reduceat(sizes, starts, dtype=np.float64) / np.maximum(counts, 1)
    rows = zip(held, parts, counts.tolist(), means.tolist(), np.maximum.reduceat(sizes, starts).tolist(), strict=True)
    for row, gaps, count, mean, largest in rows:
        if count:
            found["gaps"][row], found["gap_mean"][row], found["gap_max"][row] = gaps, mean, largest
    return found


def _joined(texts: Sequence[str | None]) -> str | None:
    """Return the texts as one; None if one of them is unknown."""
    return None if None in texts else "".join(text or "" for text in texts)


def _advantages(header: Header, kind: Kind) -> list[float]:
    try:
        return advantages(header.rewards, kind).tolist()
    except (ValueError, IndexError):
        return []


def _message(raw: bytes | Header, kind: Any) -> Any:
    try:
        return codec.decode(raw, kind) if isinstance(raw, bytes) else None
    except codec.CorruptMessage:
        return None
