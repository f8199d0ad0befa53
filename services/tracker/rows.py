"""Makes rows of the sample log from groups that ended. Pure, except for the tokenizer.

Guarantees: a damaged header, payload or ticket never raises: its rows have what can be read, and a reason. A value that does not
fit its column is null, and the others stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from services.groups.advantages import Kind, advantages
from services.operations.inspection.text import TextReader
from services.operations.samples.columns import SCHEMA
from services.protocol import codec
from services.protocol.messages import Header, Ticket
from services.protocol.payloads import Payload

GroupKey = tuple[str, int, str, int]
"""Payload or ticket of a group, step, outcome, incarnation: after a restore, a step may train the same tokens again."""
Gaps = Mapping[tuple[str, int], np.ndarray]
"""Payload and place of a segment in it -> logprob gaps of the segment's sampled tokens (services/protocol/logprob_gaps.py)."""
KEPT_BITS = np.uint32(0xFFFFE000)  # of a logprob: 10 bits after the point of its mantissa, some 3 digits
_UNFIT = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""Errors raised by values that do not fit their columns: numbers of an invalid header may have any size."""


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
    """Their approximate size."""

    @property
    def key(self) -> GroupKey:
        """Return its identity in the log."""
        return self.payload or self.ticket, self.step, self.outcome.partition(":")[0], self.incarnation


class LoggedRows:
    """Rows of the sample log: one for each completion of a group, or one for a group without any."""

    def __init__(self, reader: TextReader, kind: Kind, now_s: float) -> None:
        """`kind`: which advantages the groups have; `now_s`: when the rows are written, Unix seconds."""
        self._reader, self._now_s = reader, now_s
        self._kind: Kind = kind
        self._rows = list[dict[str, Any]]()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def columns(self) -> dict[str, list[Any]]:
        """Return all columns of `SCHEMA`."""
        return {name: [row.get(name) for row in self._rows] for name in SCHEMA.names}

    def add(self, group: EndedGroup, payload: Payload | None, gaps: Gaps | None = None) -> None:
        """Add the rows of a group. `gaps`: those of its step."""
        header = group.header if isinstance(group.header, Header) else codec.readable(group.header, Header)
        outcome, _, reason = group.outcome.partition(":")
        shared: dict[str, Any] = {
            "group": group.ticket,
            "step": group.step,
            "outcome": outcome,
            "reason": reason,
            "incarnation": group.incarnation,
            "payload": group.key[0],
            "logged_s": self._now_s,
            "notes": "",
            "scores": [],
        }
        if header is None:
            ticket = codec.readable(group.header, Ticket) if isinstance(group.header, bytes) else None
            self._rows.append(shared | (self._of_ticket(ticket) if ticket else {}))
            return
        for name in ("source", "seq", "prompt_tokens", "generator", "generate_s", "score_s"):
            shared[name] = getattr(header, name)
        rows = [shared | own for own in _figures(header, self._kind)] or [shared]
        if payload is not None and len(payload.lengths) == len(header.lengths):
            with contextlib.suppress(IndexError, ValueError, TypeError):  # columns that do not fit together
                prompt = self._reader.text(payload.prompt.tolist())
                for row in rows:
                    row["prompt"] = prompt
                tokens = list(_tokens(header, payload, self._reader, gaps or {}))
                for row, own in zip(rows, tokens, strict=False):
                    row |= own
        self._rows += rows

    def _of_ticket(self, ticket: Ticket) -> dict[str, Any]:
        """Return source, place in the order of issue and prompt of a ticket."""
        prompt = self._reader.text(ticket.prompt)
        return {"source": ticket.source, "seq": ticket.seq, "prompt": prompt, "prompt_tokens": len(ticket.prompt)}


def column(name: str, values: Sequence[Any]) -> Any:
    """Return the column of that name."""
    kind: Any = SCHEMA.field(name).type
    try:
        return pa.array(values, kind)
    except _UNFIT:
        return pa.array([value if _fits(value, kind) else None for value in values], kind)


def _fits(value: Any, kind: Any) -> bool:
    try:
        pa.array([value], kind)
    except _UNFIT:
        return False
    return True


def _places(header: Header) -> list[list[int]]:
    """Return the places of each rollout's segments; without `rollout`, segment i is rollout i."""
    if not header.rollout:
        return [[place] for place in range(max(len(header.lengths), len(header.rewards)))]
    found: list[list[int]] = [[] for _ in header.rewards]
    for place, owner in enumerate(header.rollout):
        if 0 <= owner < len(found):
            found[owner].append(place)
    return found


def _figures(header: Header, kind: Kind) -> Iterator[dict[str, Any]]:
    """Yield the header's values for each rollout; what it lacks is None."""
    given, places = _advantages(header.rewards, kind), _places(header)
    defaults = {"turns": 1, "tool_s": 0.0, "tool_calls": 0, "malformed_calls": 0}
    columns = {name: getattr(header, name) for name in ("solved", "truncated", *defaults)}
    for i, reward in enumerate(header.rewards):
        yield {
            "sample": i,
            "advantage": given[i] if given else None,
            **{name: _at(values, i) if values else defaults.get(name) for name, values in columns.items()},
            "reward": reward,
            "length": _over(header.lengths, places[i], sum),
            "tool_tokens": _over(header.tool_tokens, places[i], sum),
            "oldest": _over(header.oldest, places[i], min),
            "newest": _over(header.newest, places[i], max),
            "scores": [(name, scores[i]) for name, scores in header.scores.items() if i < len(scores)],
        }


def _at(values: Sequence[Any], i: int) -> Any:
    return values[i] if i < len(values) else None


def _over(values: Sequence[int], places: Sequence[int], fold: Callable[[list[int]], int]) -> int | None:
    return fold([values[place] for place in places]) if places and places[-1] < len(values) else None


def _advantages(rewards: Sequence[float], kind: Kind) -> list[float] | None:
    if not rewards or not np.isfinite(rewards).all() or (kind == "rloo" and len(rewards) < 2):
        return None
    return advantages(rewards, kind).tolist()


def _tokens(header: Header, payload: Payload, reader: TextReader, gaps: Gaps) -> Iterator[dict[str, Any]]:
    """Yield what the tokens of a group give for each rollout: texts, logprobs and gaps.

    Raises ValueError or IndexError for columns that do not fit together.
    """
    ends, contexts = _ends(payload), payload.own_contexts if len(payload.context_lengths) else []
    if sorted(header.rollout) != header.rollout or min(header.rollout, default=0) < 0:
        raise ValueError("the segments of a rollout do not follow each other")
    whole = _gaps(payload, header.payload, ends, gaps)
    logprobs = (payload.logprobs.view(np.uint32) & KEPT_BITS).view(np.float32)
    for i, own in enumerate(_places(header)):
        start, end = (ends[own[0]], ends[own[-1] + 1]) if own else (0, 0)
        texts = [reader.text(payload.tokens[ends[place] : ends[place + 1]].tolist()) for place in own]
        several = len(own) > 1 or any(len(contexts) and len(contexts[place]) for place in own)
        yield {
            "completion": None if None in texts else "".join(text or "" for text in texts),
            "segments": _segments(header, own, contexts, texts, reader) if several else None,
            "notes": payload.notes[i] if i < len(payload.notes) else "",
            "tokens": payload.tokens[start:end],
            "logprobs": logprobs[start:end],
            **_gap_columns(whole[start:end]),
        }


def _ends(payload: Payload) -> list[int]:
    """Return where segments begin, and where the last one ends."""
    if payload.lengths.ndim != 1 or (payload.lengths < 0).any():
        raise ValueError(f"lengths {payload.lengths.tolist()}")
    ends = [0, *accumulate(payload.lengths.tolist())]
    for values, kind in ((payload.tokens, np.int32), (payload.logprobs, np.float32)):
        if values.shape != (ends[-1],) or values.dtype != kind:
            raise ValueError(f"tokens or logprobs of shape {values.shape} and type {values.dtype}, not {ends[-1]}")
    return ends


def _segments(
    header: Header, places: Sequence[int], contexts: Sequence[Any], texts: Sequence[str | None], reader: TextReader
) -> list[dict[str, Any]]:
    return [
        {
            "context": reader.text(contexts[place].tolist()) if len(contexts) and len(contexts[place]) else None,
            "text": text,
            "context_tokens": header.context_sizes[place],
            "length": header.lengths[place],
            "oldest": header.oldest[place],
            "newest": header.newest[place],
        }
        for place, text in zip(places, texts, strict=True)
    ]


def _gaps(payload: Payload, name: str, ends: Sequence[int], gaps: Gaps) -> np.ndarray:
    """Return the gaps of all tokens; NaN where there is none."""
    whole, sampled = np.full(len(payload.tokens), np.nan, np.float32), np.ones(len(payload.tokens), bool)
    for place, start, end in payload.tool_spans.tolist():
        sampled[ends[place] + start : ends[place] + end] = False
    for place in range(len(payload.lengths)):
        own, chosen = whole[ends[place] : ends[place + 1]], sampled[ends[place] : ends[place + 1]]
        known = gaps.get((name, place))
        if known is not None and len(known) == chosen.sum():
            own[chosen] = known
    return whole


def _gap_columns(gaps: np.ndarray) -> dict[str, Any]:
    """Return a rollout's gaps, with the mean and the maximum of their sizes; nothing if no token has one."""
    known = np.abs(gaps[np.isfinite(gaps)])
    return {"gaps": gaps, "gap_mean": float(known.mean()), "gap_max": float(known.max())} if len(known) else {}
