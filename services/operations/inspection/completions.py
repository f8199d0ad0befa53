"""Reads the prompt and completions of a group, with scores and advantages, and the segments of each.

Guarantees: a damaged header or payload never raises; it is shown as far as it can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from services.groups.advantages import Kind, advantages
from services.operations.inspection.answer import Answer
from services.operations.inspection.parts import CompletionPart, read_parts
from services.operations.inspection.text import Passage, TextReader, notes_on_text, read_passage
from services.protocol.messages import Header
from services.protocol.payloads import Payload

MAX_COMPLETIONS = 64  # per answer

T = TypeVar("T")


class VersionSpan(Answer):
    """A span of tokens sampled by one policy version."""

    version: int
    start: int
    """First token of the span, from 0."""
    end: int
    """First token after the span."""


class CompletionSegment(Answer):
    """One segment of a completion: tokens that only ever grew. Values missing from the header are null."""

    index: int
    """Position in the group, over all completions."""
    length: int | None
    """Number of tokens after its context, according to the header."""
    oldest: int | None
    """Oldest policy version among its tokens."""
    newest: int | None
    """Newest policy version among its tokens."""
    tool_tokens: int | None
    """Tokens after its context that the policy did not sample."""
    spans: list[VersionSpan]
    """Policy versions that sampled its tokens."""
    context: Passage | None
    """Its own context; null when it follows the prompt, or its tokens are deleted."""
    parts: list[CompletionPart] | None
    """Its tokens, divided into sampled tokens and those read in between; null if they are deleted."""


class Completion(Answer):
    """One completion of a group: one rollout. Values missing from its header are null."""

    index: int
    """Position in the group."""
    length: int | None
    """Number of tokens in all its segments, without contexts, according to the header."""
    reward: float | None
    """Weighted sum of the scores."""
    scores: dict[str, float | None]
    """Verifier, or verifier.part -> unweighted score."""
    advantage: float | None
    """Advantage by `advantage.kind`, over the whole group; null without the run's configuration."""
    truncated: bool | None
    """Whether it reached `sampling.max_tokens` or another limit."""
    oldest: int | None
    """Oldest policy version among its tokens."""
    newest: int | None
    """Newest policy version among its tokens."""
    tool_tokens: int | None
    """Tokens not sampled by the policy, without contexts."""
    turns: int | None
    """Turns of the policy."""
    tool_s: float | None
    """Seconds that its environment took."""
    tool_calls: int | None
    """Tools that the policy called."""
    malformed_calls: int | None
    """Turns whose tool calls could not be parsed; the policy got the reason."""
    segments: list[CompletionSegment]
    """Its segments: one, unless its history was rewritten."""
    note: dict[str, Any] | None = None
    """Verifier -> what it returned besides its score; null if none returned anything else, or the tokens are deleted."""


def read_completions(
    header: Header, payload: Payload | None, reader: TextReader, kind: Kind | None, shown: slice
) -> tuple[Passage | None, list[Completion], list[str]]:
    """Return the prompt, the completions `shown`, and notes on what does not fit. `kind`: how to compute advantages."""
    held = None if payload is None else _held(payload, header)
    if held is None:
        prompt, note = None, [] if payload is None else ["its tokens do not match its header"]
    else:
        prompt, note = read_passage(held.payload.prompt.tolist(), reader), notes_on_text(reader)
    given, why = _advantages(header, kind)
    completions: list[Completion] = []
    for i in range(completions_of(header))[shown]:
        segments = [_segment(header, held, reader, place) for place, owner in enumerate(header.owners) if owner == i]
        completions.append(
            Completion(
                index=i,
                length=_total(segment.length for segment in segments),
                reward=_at(header.rewards, i),
                scores={verifier: _at(scores, i) for verifier, scores in header.scores.items()},
                advantage=_at(given, i),
                truncated=_at(header.truncated, i),
                oldest=min((s.oldest for s in segments if s.oldest is not None), default=None),
                newest=max((s.newest for s in segments if s.newest is not None), default=None),
                tool_tokens=_total(segment.tool_tokens for segment in segments),
                turns=_at(header.turns, i) if header.turns else 1,
                tool_s=_at(header.tool_s, i) if header.tool_s else 0.0,
                tool_calls=_at(header.tool_calls, i) if header.tool_calls else 0,
                malformed_calls=_at(header.malformed_calls, i) if header.malformed_calls else 0,
                segments=segments,
                note=_note(payload, i),
            )
        )
    return prompt, completions, note + why


def completions_of(header: Header) -> int:
    """Return the number of completions in a header, which may be damaged: those that have a segment."""
    return max((owner + 1 for owner in header.owners if owner < len(header.owners)), default=0)


@dataclass(frozen=True)
class _Held:
    """A payload that matches its header."""

    payload: Payload
    ends: np.ndarray  # [s + 1] offsets at which segments begin and end
    contexts: list[np.ndarray]  # [s] own contexts


def _segment(header: Header, held: _Held | None, reader: TextReader, place: int) -> CompletionSegment:
    context = parts = None
    spans: list[VersionSpan] = []
    if held is not None:
        tokens = held.payload.tokens[held.ends[place] : held.ends[place + 1]].tolist()
        parts = read_parts(held.payload, place, tokens, reader)
        if len(held.contexts[place]):
            context = read_passage(held.contexts[place].tolist(), reader)
        rows = held.payload.spans[held.payload.spans[:, 0] == place].tolist()
        spans = [VersionSpan(version=version, start=start, end=end) for _, version, start, end in rows]
    return CompletionSegment(
        index=place,
        length=_at(header.lengths, place),
        oldest=_at(header.oldest, place),
        newest=_at(header.newest, place),
        tool_tokens=_at(header.tool_tokens, place),
        spans=spans,
        context=context,
        parts=parts,
    )


def _total(numbers: Iterable[int | None]) -> int | None:
    """Return the sum of the numbers that are known, or None if none is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _note(payload: Payload | None, i: int) -> dict[str, Any] | None:
    if payload is None or not (text := _at(payload.notes, i)):
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def _held(payload: Payload, header: Header) -> _Held | None:
    """Return the payload with its segments' places, or None if it does not hold those of the header."""
    columns = payload.prompt, payload.lengths, payload.tokens, payload.context_lengths, payload.context
    if any(column.ndim != 1 or column.dtype.kind != "i" for column in columns):
        return None
    if payload.spans.ndim != 2 or payload.spans.shape[1] != 4 or payload.spans.dtype.kind != "i":
        return None
    segments, own = len(header.lengths), payload.context_lengths
    if len(payload.lengths) != segments or (payload.lengths < 0).any():
        return None
    if len(own) not in (0, segments) or (own < 0).any() or own.sum() != len(payload.context):
        return None
    ends = np.concatenate([[0], np.cumsum(payload.lengths, dtype=np.int64)])
    return _Held(payload, ends, payload.own_contexts) if ends[-1] == len(payload.tokens) else None


def _advantages(header: Header, kind: Kind | None) -> tuple[list[float], list[str]]:
    """Return the advantages [n] by `kind`, or none and the reason."""
    if kind is None:
        return [], ["no advantages: the run's folder, which contains advantage.kind, is not on this machine"]
    if not header.rewards:
        return [], ["no advantages: its header has no rewards"]
    try:
        return advantages(header.rewards, kind).tolist(), []
    except ValueError as error:
        return [], [f"no advantages: {error}"]


def _at(column: Sequence[T], i: int) -> T | None:
    """Return an entry of a column, which may be too short: headers are validated only when they are settled."""
    return column[i] if i < len(column) else None
