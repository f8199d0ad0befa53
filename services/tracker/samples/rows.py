"""Makes rows of the sample log from groups. Pure, except for the tokenizer.

Guarantees: a damaged header, payload or ticket never raises: its row has what can be read, and a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    @property
    def key(self) -> tuple[str, int, str]:
        """Return what identifies it in the log."""
        return self.payload or self.ticket, self.step, self.outcome.partition(":")[0]


def rows_of(
    group: EndedGroup, payload: Payload | None, reader: TextReader, kind: Kind, now_s: float, gaps: Gaps | None = None
) -> list[dict[str, Any]]:
    """Return a row for each completion of a group, or one row for a group without completions. `gaps`: those of its step."""
    outcome, _, reason = group.outcome.partition(":")
    base: dict[str, Any] = dict.fromkeys(SCHEMA.names) | {
        "group": group.ticket, "step": group.step, "outcome": outcome, "reason": reason, "incarnation": group.incarnation,
        "payload": group.key[0], "logged_s": now_s, "notes": "",
    }  # fmt: skip
    header = group.header if isinstance(group.header, Header) else _message(group.header, Header)
    if header is None:
        return [base | _of_ticket(group.header, reader)]
    base |= {
        "source": header.source, "generator": header.generator, "generate_s": header.generate_s, "score_s": header.score_s,
        "seq": header.seq, "prompt_tokens": header.prompt_tokens,
    }  # fmt: skip
    if payload is not None and len(payload.lengths) != len(header.lengths):
        payload = None
    if payload is not None:
        base["prompt"] = reader.text(payload.prompt.tolist())
    given, own = _advantages(header, kind), _places(header)
    figures = [base | _figures(header, i, own[i], given) for i in range(len(header.rewards))]
    try:
        texts = _Segments(header, payload, reader, gaps or {})
        return [row | texts.of(i, own[i]) for i, row in enumerate(figures)] or [base]
    except (IndexError, ValueError, TypeError):  # columns of a header or payload that do not fit together
        return figures


def _of_ticket(body: bytes | Header, reader: TextReader) -> dict[str, Any]:
    ticket = _message(body, Ticket) if isinstance(body, bytes) else None
    if ticket is None:
        return {}
    return {
        "source": ticket.source, "seq": ticket.seq, "prompt": reader.text(ticket.prompt), "prompt_tokens": len(ticket.prompt),
    }  # fmt: skip


def _places(header: Header) -> list[list[int]]:
    """Return the places of each rollout's segments."""
    found: list[list[int]] = [[] for _ in header.rewards]
    for place, owner in enumerate(header.owners):
        if 0 <= owner < len(found):
            found[owner].append(place)
    return found


def _figures(header: Header, i: int, own: Sequence[int], given: Sequence[float]) -> dict[str, Any]:
    def total(column: Sequence[int]) -> int | None:
        return sum(column[place] for place in own) if own and own[-1] < len(column) else None

    oldest = [header.oldest[place] for place in own if place < len(header.oldest)]
    newest = [header.newest[place] for place in own if place < len(header.newest)]
    return {
        "sample": i, "reward": header.rewards[i], "advantage": _at(given, i), "solved": _at(header.solved, i),
        "scores": [(name, scores[i]) for name, scores in header.scores.items() if i < len(scores)],
        "truncated": _at(header.truncated, i), "length": total(header.lengths), "tool_tokens": total(header.tool_tokens),
        "turns": _at(header.turns, i) if header.turns else 1, "tool_s": _at(header.tool_s, i) if header.tool_s else 0.0,
        "oldest": min(oldest, default=None), "newest": max(newest, default=None),
    }  # fmt: skip


class _Segments:
    """The tokens of a group, by rollout."""

    def __init__(self, header: Header, payload: Payload | None, reader: TextReader, gaps: Gaps) -> None:
        self._header, self._payload, self._reader, self._gaps = header, payload, reader, gaps
        self._ends: list[int] = np.cumsum(payload.lengths).tolist() if payload is not None else []
        self._contexts = payload.own_contexts if payload is not None else []

    def of(self, i: int, own: Sequence[int]) -> dict[str, Any]:
        """Return texts, tokens and logprobs of a rollout, whose segments are in places `own`; nothing if its tokens are gone."""
        payload = self._payload
        if payload is None or self._ends[-1:] != [len(payload.tokens)]:
            return {}
        tokens = [self._cut(payload.tokens, place) for place in own]
        texts = [self._reader.text(part.tolist()) for part in tokens]
        logprobs = _joined([self._cut(payload.logprobs, place) for place in own], payload.logprobs)
        return {
            "completion": None if None in texts else "".join(text or "" for text in texts),
            "tokens": _joined(tokens, payload.tokens), "logprobs": (logprobs.view(np.uint32) & KEPT_BITS).view(np.float32),
            "segments": self._segments(own, texts), "notes": payload.notes[i] if i < len(payload.notes) else "",
            **self._gaps_of(payload, own),
        }  # fmt: skip

    def _segments(self, own: Sequence[int], texts: Sequence[str | None]) -> list[dict[str, Any]] | None:
        """Return the segments of a rollout that has several, or contexts of its own."""
        contexts, header = [self._contexts[place] for place in own], self._header
        if len(own) < 2 and not any(len(context) for context in contexts):
            return None
        return [
            {
                "context": self._reader.text(context.tolist()) if len(context) else None, "text": text,
                "context_tokens": header.context_sizes[place], "length": header.lengths[place],
                "oldest": header.oldest[place], "newest": header.newest[place],
            }
            for place, text, context in zip(own, texts, contexts, strict=True)
        ]  # fmt: skip

    def _gaps_of(self, payload: Payload, own: Sequence[int]) -> dict[str, Any]:
        """Return the logprob gaps of a rollout, NaN where there is none; nothing if no token has one."""
        name = self._header.payload
        if not any((name, place) in self._gaps for place in own):
            return {}
        gaps = _joined([self._gaps_in(payload, place) for place in own], payload.logprobs)
        sizes = np.abs(gaps[np.isfinite(gaps)])
        return {"gaps": gaps, "gap_mean": sizes.sum() / len(sizes), "gap_max": sizes.max()} if len(sizes) else {}

    def _gaps_in(self, payload: Payload, place: int) -> np.ndarray:
        """Return the logprob gaps of a segment, [its length] float32."""
        length, known = int(payload.lengths[place]), self._gaps.get((self._header.payload, place))
        if known is not None and not len(payload.tool_spans) and len(known) == length:
            return known
        gaps, sampled = np.full(length, np.nan, np.float32), np.ones(length, bool)
        for segment, start, end in payload.tool_spans:
            if segment == place:
                sampled[start:end] = False
        if known is not None and len(known) == sampled.sum():
            gaps[sampled] = known
        return gaps

    def _cut(self, column: np.ndarray, place: int) -> np.ndarray:
        return column[self._ends[place - 1] if place else 0 : self._ends[place]]


def _joined(parts: Sequence[np.ndarray], column: np.ndarray) -> np.ndarray:
    """Return the parts of `column` as one array."""
    return parts[0] if len(parts) == 1 else np.concatenate([column[:0], *parts])


def _advantages(header: Header, kind: Kind) -> list[float]:
    try:
        return advantages(header.rewards, kind).tolist()
    except (ValueError, IndexError):
        return []


def _at(column: Sequence[Any], i: int) -> Any:
    return column[i] if i < len(column) else None


def _message(raw: bytes | Header, kind: Any) -> Any:
    try:
        return codec.decode(raw, kind) if isinstance(raw, bytes) else None
    except codec.CorruptMessage:
        return None
