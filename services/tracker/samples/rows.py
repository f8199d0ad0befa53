"""Makes rows of the sample log from groups. Pure, except for the tokenizer.

Guarantees: a damaged header, payload or ticket never raises: its row has what can be read, and a reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.algorithm.advantages import Kind, advantages
from services.operations.inspection.text import TextReader
from services.operations.samples.columns import SCHEMA
from services.protocol import codec
from services.protocol.messages import Header, Payload, Ticket
from services.store.calls.samples import WHOLE

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


def is_sampled(ticket: str, share: float) -> bool:
    """Return whether the log has a ticket, as functions/prelude.lua decides it."""
    return int(hashlib.sha1(ticket.encode()).hexdigest()[:8], 16) < round(share * WHOLE)


def rows_of(group: EndedGroup, payload: Payload | None, reader: TextReader, kind: Kind, now_s: float) -> list[dict[str, Any]]:
    """Return a row for each completion of a group, or one row for a group without completions."""
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
    given = _advantages(header, kind)
    figures = [base | {"sample": i} | _figures(header, i, given) for i in range(len(header.rewards))]
    try:
        texts = _Segments(header, payload, reader)
        return [row | texts.of(i) for i, row in enumerate(figures)] or [base]
    except (IndexError, ValueError, TypeError):  # columns of a header or payload that do not fit together
        return figures


def _of_ticket(body: bytes | Header, reader: TextReader) -> dict[str, Any]:
    ticket = _message(body, Ticket) if isinstance(body, bytes) else None
    if ticket is None:
        return {}
    return {
        "source": ticket.source, "seq": ticket.seq, "prompt": reader.text(ticket.prompt), "prompt_tokens": len(ticket.prompt),
    }  # fmt: skip


def _figures(header: Header, i: int, given: Sequence[float]) -> dict[str, Any]:
    own = [place for place, owner in enumerate(header.owners) if owner == i]

    def total(column: Sequence[int]) -> int | None:
        return sum(column[place] for place in own) if own and own[-1] < len(column) else None

    oldest = [header.oldest[place] for place in own if place < len(header.oldest)]
    newest = [header.newest[place] for place in own if place < len(header.newest)]
    return {
        "reward": header.rewards[i], "advantage": _at(given, i), "solved": _at(header.solved, i),
        "scores": [(name, scores[i]) for name, scores in header.scores.items() if i < len(scores)],
        "truncated": _at(header.truncated, i), "length": total(header.lengths), "tool_tokens": total(header.tool_tokens),
        "turns": _at(header.turns, i) if header.turns else 1, "tool_s": _at(header.tool_s, i) if header.tool_s else 0.0,
        "oldest": min(oldest, default=None), "newest": max(newest, default=None),
    }  # fmt: skip


class _Segments:
    """The tokens of a group, by rollout."""

    def __init__(self, header: Header, payload: Payload | None, reader: TextReader) -> None:
        self._header, self._payload, self._reader = header, payload, reader
        self._ends: list[int] = np.cumsum(payload.lengths).tolist() if payload is not None else []

    def of(self, i: int) -> dict[str, Any]:
        """Return texts, tokens and logprobs of a rollout; nothing if its tokens are gone."""
        payload, header = self._payload, self._header
        if payload is None or self._ends[-1:] != [len(payload.tokens)]:
            return {}
        own = [place for place, owner in enumerate(header.owners) if owner == i]
        tokens = [self._cut(payload.tokens, place) for place in own]
        texts = [self._reader.text(part.tolist()) for part in tokens]
        contexts = [payload.own_contexts[place] for place in own]
        whole = len(own) > 1 or any(len(context) for context in contexts)
        logprobs = np.concatenate([self._cut(payload.logprobs, place) for place in own]) if own else payload.logprobs[:0]
        segments = [
            {
                "context": self._reader.text(context.tolist()) if len(context) else None, "text": text,
                "context_tokens": header.context_sizes[place], "length": header.lengths[place],
                "oldest": header.oldest[place], "newest": header.newest[place],
            }
            for place, text, context in zip(own, texts, contexts, strict=True)
        ]  # fmt: skip
        return {
            "completion": None if None in texts else "".join(text or "" for text in texts),
            "tokens": np.concatenate(tokens) if own else [], "logprobs": (logprobs.view(np.uint32) & KEPT_BITS).view(np.float32),
            "segments": segments if whole else None, "notes": payload.notes[i] if i < len(payload.notes) else "",
        }  # fmt: skip

    def _cut(self, column: np.ndarray, place: int) -> np.ndarray:
        return column[self._ends[place - 1] if place else 0 : self._ends[place]]


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
