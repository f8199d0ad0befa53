"""Prompt and completions of a group, with what was made of them.

Guarantees: a header or payload that does not fit is shown as far as it does, and never an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from services.algorithm.advantages import Kind, advantages
from services.operations.inspection import Answer
from services.operations.inspection.text import TextReader
from services.protocol.messages import Header, Payload

MAX_COMPLETIONS = 64  # of one answer

T = TypeVar("T")


class Passage(Answer):
    """Some tokens, as text where there is a tokenizer for them."""

    tokens: int
    """How many."""
    text: str | None
    """What they say, special tokens included."""
    token_ids: list[int] | None
    """The tokens themselves, where there is no text."""


class VersionSpan(Answer):
    """Tokens that one policy version sampled."""

    version: int
    start: int
    """First token, from 0."""
    end: int
    """First token after them."""


class Completion(Answer):
    """One completion of a group. A value that its header does not have is null."""

    index: int
    """Place in the group."""
    length: int | None
    """Tokens, by the header."""
    reward: float | None
    """Weighted sum of the scores."""
    scores: dict[str, float | None]
    """Verifier -> unweighted score, 0..1."""
    advantage: float | None
    """By `advantage.kind`, over the whole group; null without the run's configuration."""
    truncated: bool | None
    """Whether it hit `sampling.max_tokens`."""
    oldest: int | None
    """Oldest policy version of a token."""
    newest: int | None
    """Newest policy version of a token."""
    tool_tokens: int | None
    """Tokens that the policy did not sample."""
    spans: list[VersionSpan]
    """Who sampled which tokens."""
    passage: Passage | None
    """Its tokens; null when they are gone."""


def read_completions(
    header: Header, payload: Payload | None, reader: TextReader, kind: Kind | None, shown: slice
) -> tuple[Passage | None, list[Completion], list[str]]:
    """The prompt, the completions `shown`, and what is missing or does not fit. `kind`: how advantages are computed."""
    ends = None if payload is None else _ends(payload, len(header.lengths))
    if payload is None or ends is None:
        prompt, note = None, ["its tokens are gone" if payload is None else "its tokens do not fit its header"]
    else:
        prompt, note = read_passage(payload.prompt.tolist(), reader), notes_on_text(reader)
    given, why = _advantages(header, kind)
    completions = []
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
                spans=spans, passage=passage,
            )
        )  # fmt: skip
    return prompt, completions, note + why


def read_passage(tokens: list[int], reader: TextReader) -> Passage:
    """Tokens as text, or as they are."""
    text = reader.text(tokens)
    return Passage(tokens=len(tokens), text=text, token_ids=tokens if text is None else None)


def notes_on_text(reader: TextReader) -> list[str]:
    """Why there is no text, if so."""
    return [f"token ids, not text: {reader.why_not}"] if reader.why_not else []


def _ends(payload: Payload, n: int) -> np.ndarray | None:
    """[n + 1] where completions begin and end, or None where the payload is not of n completions."""
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
    """Advantages [n] by `kind`, or none and why."""
    if kind is None:
        return [], ["no advantages: the run's folder is not here, and with it advantage.kind"]
    if not header.rewards:
        return [], ["no advantages: its header has no rewards"]
    try:
        return advantages(header.rewards, kind).tolist(), []
    except ValueError as error:
        return [], [f"no advantages: {error}"]


def _at(column: Sequence[T], i: int) -> T | None:
    """An entry of a column that may be too short: a header that was not settled yet is not checked."""
    return column[i] if i < len(column) else None
