"""Reads the prompt and completions of a group, with scores and advantages.

Guarantees: a damaged header or payload never raises; it is shown as far as it can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from services.algorithm.advantages import Kind, advantages
from services.operations.inspection import Answer
from services.operations.inspection.text import TextReader
from services.protocol.messages import Header, Payload

MAX_COMPLETIONS = 64  # per answer

T = TypeVar("T")


class Passage(Answer):
    """Tokens, as text if the tokenizer is available."""

    tokens: int
    """Number of tokens."""
    text: str | None
    """The decoded text, including special tokens."""
    token_ids: list[int] | None
    """The token ids, if there is no text."""


class VersionSpan(Answer):
    """A span of tokens sampled by one policy version."""

    version: int
    start: int
    """First token of the span, from 0."""
    end: int
    """First token after the span."""


class Completion(Answer):
    """One completion of a group. Values missing from its header are null."""

    index: int
    """Position in the group."""
    length: int | None
    """Number of tokens, according to the header."""
    reward: float | None
    """Weighted sum of the scores."""
    scores: dict[str, float | None]
    """Verifier, or verifier.part -> unweighted score."""
    advantage: float | None
    """Advantage by `advantage.kind`, over the whole group; null without the run's configuration."""
    truncated: bool | None
    """Whether it reached `sampling.max_tokens`."""
    oldest: int | None
    """Oldest policy version among its tokens."""
    newest: int | None
    """Newest policy version among its tokens."""
    tool_tokens: int | None
    """Tokens not sampled by the policy."""
    spans: list[VersionSpan]
    """Policy versions that sampled its tokens."""
    passage: Passage | None
    """Its tokens; null when they are deleted."""
    note: dict[str, Any] | None = None
    """Verifier -> what it said besides its score; null if none said anything, or its tokens are deleted."""


def read_completions(
    header: Header, payload: Payload | None, reader: TextReader, kind: Kind | None, shown: slice
) -> tuple[Passage | None, list[Completion], list[str]]:
    """Return the prompt, the completions `shown`, and notes on missing or damaged data. `kind`: how to compute advantages."""
    ends = None if payload is None else _ends(payload, len(header.lengths))
    if payload is None or ends is None:
        prompt, note = None, ["its tokens are deleted" if payload is None else "its tokens do not match its header"]
    else:
        prompt, note = read_passage(payload.prompt.tolist(), reader), notes_on_text(reader)
    given, why = _advantages(header, kind)
    completions: list[Completion] = []
    for i in range(len(header.lengths))[shown]:
        passage, spans = None, []
        if payload is not None and ends is not None:
            passage = read_passage(payload.tokens[ends[i] : ends[i + 1]].tolist(), reader)
            rows = payload.spans[payload.spans[:, 0] == i].tolist()
            spans = [VersionSpan(version=version, start=start, end=end) for _, version, start, end in rows]
        completions.append(
            Completion(
                index=i, length=_at(header.lengths, i), reward=_at(header.rewards, i),
                scores={verifier: _at(scores, i) for verifier, scores in header.scores.items()},
                advantage=_at(given, i), truncated=_at(header.truncated, i),
                oldest=_at(header.oldest, i), newest=_at(header.newest, i), tool_tokens=_at(header.tool_tokens, i),
                spans=spans, passage=passage, note=_note(payload, i),
            )
        )  # fmt: skip
    return prompt, completions, note + why


def _note(payload: Payload | None, i: int) -> dict[str, Any] | None:
    if payload is None or not (text := _at(payload.notes, i)):
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def read_passage(tokens: list[int], reader: TextReader) -> Passage:
    """Return tokens as text or, without a tokenizer, as ids."""
    text = reader.text(tokens)
    return Passage(tokens=len(tokens), text=text, token_ids=tokens if text is None else None)


def notes_on_text(reader: TextReader) -> list[str]:
    """Return why there is no text; empty if there is."""
    return [f"token ids instead of text: {reader.why_not}"] if reader.why_not else []


def _ends(payload: Payload, n: int) -> np.ndarray | None:
    """Return the offsets [n + 1] at which completions begin and end, or None if the payload does not hold n completions."""
    columns = payload.prompt, payload.lengths, payload.tokens
    if any(column.ndim != 1 or column.dtype.kind != "i" for column in columns):
        return None
    if payload.spans.ndim != 2 or payload.spans.shape[1] != 4 or payload.spans.dtype.kind != "i":
        return None
    if len(payload.lengths) != n or (payload.lengths < 0).any():
        return None
    ends = np.concatenate([[0], np.cumsum(payload.lengths, dtype=np.int64)])
    return ends if ends[-1] == len(payload.tokens) else None


def _advantages(header: Header, kind: Kind | None) -> tuple[list[float], list[str]]:
    """Return the advantages [n] by `kind`, or none and the reason."""
    if kind is None:
        return [], ["no advantages: the run's folder, which holds advantage.kind, is not on this machine"]
    if not header.rewards:
        return [], ["no advantages: its header has no rewards"]
    try:
        return advantages(header.rewards, kind).tolist(), []
    except ValueError as error:
        return [], [f"no advantages: {error}"]


def _at(column: Sequence[T], i: int) -> T | None:
    """Return an entry of a column, which may be too short: headers are validated only when they are settled."""
    return column[i] if i < len(column) else None
