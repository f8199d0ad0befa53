"""Makes rows of the sample log from groups. Pure, except for the tokenizer.

Guarantees: a damaged header, payload or ticket never raises: its row has what can be read, and a reason.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.algorithm.advantages import Kind, advantages
from services.operations.inspection.text import TextReader
from services.protocol import codec
from services.protocol.messages import Header, Ticket
from services.protocol.payloads import Payload
from services.tracker.samples.arrays import Ragged, column, maps
from services.tracker.samples.tokens import Gaps, GroupTokens

_SHARED = (
    "group", "step", "outcome", "reason", "incarnation", "payload",
    "source", "seq", "prompt", "prompt_tokens", "generator", "generate_s", "score_s",
)  # fmt: skip
"""Columns with one value for all rows of a group."""
_OWN = (
    "sample", "reward", "solved", "truncated", "length", "tool_tokens", "turns", "tool_s", "tool_calls", "malformed_calls",
    "oldest", "newest", "completion", "notes", "segments",
)  # fmt: skip
"""Columns with a value for each row."""
GroupKey = tuple[str, int, str, int]
"""Payload or ticket of a group, step, outcome, incarnation: after a restore, a step may train the same tokens again."""
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
    """Their approximate size."""

    @property
    def key(self) -> GroupKey:
        """Return its identity in the log."""
        return self.payload or self.ticket, self.step, self.outcome.partition(":")[0], self.incarnation


class LoggedRows:
    """Rows of the sample log, column by column: one for each completion of a group, or one for a group without any."""

    def __init__(self, reader: TextReader, kind: Kind, now_s: float) -> None:
        """`kind`: which advantages the groups have; `now_s`: when the rows are written, Unix seconds."""
        self._reader, self._now_s = reader, now_s
        self._kind: Kind = kind
        self._counts = list[int]()  # rows of each group
        self._rewards = list[list[float]]()  # of each group
        self._shared = list[tuple[Any, ...]]()  # values of each group, by `_SHARED`
        self._own: dict[str, list[Any]] = {name: [] for name in _OWN}
        self._scores: tuple[list[int], list[str], list[float]] = [], [], []  # number in each row; names and values of all
        self._tokens, self._logprobs, self._gaps = Ragged(np.int32), Ragged(np.float32), Ragged(np.float32)

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(self._counts)

    def columns(self) -> dict[str, Any]:
        """Return all columns of `SCHEMA`, as arrays or lists."""
        group_of = pa.array(np.repeat(np.arange(len(self._counts)), self._counts))
        shared = [column(name, values) for name, values in zip(_SHARED, zip(*self._shared, strict=True), strict=True)]
        logprobs = self._logprobs.elements()
        return {
            **{name: pc.take(values, group_of) for name, values in zip(_SHARED, shared, strict=True)}, **self._own,
            **_gap_columns(self._gaps),
            "logged_s": pa.array(np.full(len(self), self._now_s)), "scores": maps(*self._scores),
            "advantage": _advantages(self._rewards, self._counts, self._kind), "tokens": self._tokens.column(),
            "logprobs": self._logprobs.column((logprobs.view(np.uint32) & KEPT_BITS).view(np.float32)),
        }  # fmt: skip

    def add(self, group: EndedGroup, payload: Payload | None, gaps: Gaps | None = None) -> None:
        """Add the rows of a group. `gaps`: those of its step."""
        header = group.header if isinstance(group.header, Header) else _message(group.header, Header)
        outcome, _, reason = group.outcome.partition(":")
        shared = group.ticket, group.step, outcome, reason, group.incarnation, group.key[0]
        if header is None:
            self._shared.append((*shared, *self._of_ticket(group.header), None, None, None))
            self._extend(1, [], {}, {"notes": [""]}, None)
            return
        places, prompt, tokens = _places(header), None, None
        if payload is not None and len(payload.lengths) == len(header.lengths):
            with contextlib.suppress(IndexError, ValueError, TypeError):  # columns that do not fit together
                prompt = self._reader.text(payload.prompt.tolist())
                tokens = GroupTokens(header, payload, places, self._reader, gaps or {})
        said = header.source, header.seq, prompt, header.prompt_tokens, header.generator, header.generate_s, header.score_s
        self._shared.append((*shared, *said))
        self._extend(len(header.rewards) or 1, header.rewards, header.scores, _figures(header, places), tokens)

    def _extend(
        self,
        count: int,
        rewards: list[float],
        scores: Mapping[str, list[float]],
        own: Mapping[str, Sequence[Any]],
        tokens: GroupTokens | None,
    ) -> None:
        """Add `count` rows, with their own values by column; what is missing is null."""
        self._counts.append(count)
        self._rewards.append(rewards)
        if tokens is not None:
            own = {**own, "completion": tokens.completions, "segments": tokens.segments, "notes": tokens.notes}
        for name, values in self._own.items():
            found = own.get(name, ())
            values += found[:count]
            if len(found) < count:
                values += [None] * (count - len(found))
        self._add_scores(count, scores)
        lengths = [] if tokens is None else tokens.lengths[:count]
        self._tokens.add(count, lengths, None if tokens is None else tokens.tokens)
        self._logprobs.add(count, lengths, None if tokens is None else tokens.logprobs)
        self._gaps.add(count, lengths, None if tokens is None else tokens.gaps)

    def _add_scores(self, count: int, scores: Mapping[str, list[float]]) -> None:
        counts, names, values = self._scores
        if all(len(each) == count for each in scores.values()):
            counts += [len(scores)] * count
            names += [*scores] * count
            values += chain.from_iterable(zip(*scores.values(), strict=True))
            return
        for row in range(count):
            own = [(name, each[row]) for name, each in scores.items() if row < len(each)]
            counts.append(len(own))
            names += [name for name, _ in own]
            values += [value for _, value in own]

    def _of_ticket(self, body: bytes | Header) -> tuple[Any, ...]:
        """Return source, place in the order of issue and prompt from a ticket."""
        ticket = _message(body, Ticket)
        if ticket is None:
            return None, None, None, None
        return ticket.source, ticket.seq, self._reader.text(ticket.prompt), len(ticket.prompt)


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
    """Return the header's values for each rollout."""

    def over(column: list[int], fold: Callable[[list[int]], int]) -> list[Any]:
        if places is None:
            return column
        return [fold([column[place] for place in own]) if own and own[-1] < len(column) else None for own in places]

    count = len(header.rewards)
    return {
        "sample": list(range(count)), "notes": [""] * (count or 1),
        "reward": header.rewards, "solved": header.solved, "truncated": header.truncated,
        "length": over(header.lengths, sum), "tool_tokens": over(header.tool_tokens, sum),
        "turns": header.turns or [1] * count, "tool_s": header.tool_s or [0.0] * count,
        "tool_calls": header.tool_calls or [0] * count, "malformed_calls": header.malformed_calls or [0] * count,
        "oldest": over(header.oldest, min), "newest": over(header.newest, max),
    }  # fmt: skip


def _gap_columns(column: Ragged) -> dict[str, Any]:
    """Return the gaps of all rows, with the mean and the maximum of their absolute values; null: a row has none."""
    gaps = column.elements()
    sizes = np.abs(gaps)
    known = np.isfinite(sizes)
    sizes[~known] = 0.0
    counts = column.reduced(np.add, known.astype(np.int64))
    means = column.reduced(np.add, sizes.astype(np.float64)) / np.maximum(counts, 1)
    none = counts == 0
    return {
        "gaps": column.column(gaps, none), "gap_mean": pa.array(means.astype(np.float32), mask=none),
        "gap_max": pa.array(column.reduced(np.maximum, sizes), mask=none),
    }  # fmt: skip


def _advantages(rewards: Sequence[list[float]], counts: Sequence[int], kind: Kind) -> Any:
    """Return the advantages of all rows, computed at once for groups of the same size; null: its group has none."""
    ends, found = np.cumsum(counts), np.full(sum(counts), np.nan)
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, own in enumerate(rewards):
        places[len(own)].append(place)
    for size, held in places.items():
        groups = np.array([rewards[place] for place in held])
        finite = np.isfinite(groups).all(axis=-1)
        if not size or not finite.any() or (kind == "rloo" and size < 2):
            continue
        rows = (ends[held] - size)[finite, None] + np.arange(size)
        found[rows] = advantages(groups[finite], kind)
    return pa.array(found, mask=np.isnan(found))


def _message(raw: bytes | Header, kind: Any) -> Any:
    try:
        return codec.decode(raw, kind) if isinstance(raw, bytes) else None
    except codec.CorruptMessage:
        return None
