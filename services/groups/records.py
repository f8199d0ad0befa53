"""Converts rollouts and completions to wire types and back. Pure.

Guarantees: what `unpack_partial` returns is within bounds for any bytes, or is nothing; header and payload agree on which
tokens are a tool's, which segments a rollout has, and which contexts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from services.groups.generated import Generated, GenerationFailed, Segment
from services.protocol import codec
from services.protocol.messages import Header, Span, Ticket
from services.protocol.payloads import Partial, Payload

MOST_TOKEN_IDS = 1 << 31
"""As many as there are nonnegative int32."""


def pack_payload(ticket: Ticket, rollouts: Sequence[Sequence[Segment]], notes: Sequence[str] = ()) -> bytes:
    """Encode the `Payload` of a group of n rollouts, with verifiers' `notes` [n] or none.

    Raises `GenerationFailed` if a rollout has no segment, or an engine's tool spans are invalid.
    """
    for number, rollout in enumerate(rollouts):
        if not rollout:
            raise GenerationFailed(f"rollout {number} has no segment: it ended before anything was sampled")
    prompt, segments = np.asarray(ticket.prompt, np.int32), _flat(rollouts)
    completions = [segment.completion for segment in segments]
    for sample, completion in enumerate(completions):
        if not _apart(completion.tool_spans, len(completion.tokens)):
            raise GenerationFailed(
                f"completion {sample} has {len(completion.tokens)} tokens and tool spans {completion.tool_spans}: spans must be "
                "within it, ascending and disjoint; fix the engine that generator.engine names"
            )
    columns: dict[str, np.ndarray] = {}
    if owners := _owners(rollouts):
        columns["rollout"] = np.array(owners, np.int32)
    if any(numbers := _contexts(prompt, segments)):
        own = [segment.context if number else segment.context[:0] for number, segment in zip(numbers, segments, strict=True)]
        columns["context_lengths"] = np.array([len(context) for context in own], np.int32)
        columns["context"] = np.concatenate(own).astype(np.int32)
    if any(segment.turns for segment in segments):
        rows = [(place, *turn) for place, segment in enumerate(segments) for turn in segment.turns]
        columns["turns"] = np.array(rows, np.float32)
    return codec.encode(Payload(prompt, *_columns(completions), notes=list(notes), **columns))


def make_header(
    ticket: Ticket,
    rollouts: Sequence[Sequence[Segment]],
    scores: dict[str, list[float]],
    rewards: list[float],
    solved: list[bool],
    *,
    payload: str,
    payload_bytes: int,
    generator: str,
    generate_s: float,
    score_s: float,
    truncated: Sequence[bool] | None = None,
    turns: Sequence[int] = (),
    tool_s: Sequence[float] = (),
    tool_calls: Sequence[int] = (),
    malformed_calls: Sequence[int] = (),
) -> Header:
    """Return the header of a finished group of n rollouts.

    `truncated` [n]: None means that a rollout is truncated if its last segment has the finish `length`.
    """
    segments = _flat(rollouts)
    completions = [segment.completion for segment in segments]
    numbers = _contexts(np.asarray(ticket.prompt, np.int32), segments)
    own = [len(segment.context) if number else 0 for number, segment in zip(numbers, segments, strict=True)]
    ended = [rollout[-1].completion.finish == "length" for rollout in rollouts]
    return Header(
        ticket=ticket.id,
        seq=ticket.seq,
        epoch=ticket.epoch,
        index=ticket.index,
        payload=payload,
        payload_bytes=payload_bytes,
        prompt_tokens=len(ticket.prompt),
        lengths=[len(c.tokens) for c in completions],
        rewards=rewards,
        scores=scores,
        truncated=ended if truncated is None else list(truncated),
        oldest=[min(span.version for span in c.spans) for c in completions],
        newest=[max(span.version for span in c.spans) for c in completions],
        generator=generator,
        generate_s=generate_s,
        score_s=score_s,
        source=ticket.source,
        trace=ticket.trace,
        tool_tokens=[sum(end - start for start, end in c.tool_spans) for c in completions],
        solved=solved,
        rollout=_owners(rollouts),
        context_tokens=own if any(numbers) else [],
        contexts=numbers if any(numbers) else [],
        turns=list(turns),
        tool_s=list(tool_s),
        tool_calls=list(tool_calls),
        malformed_calls=list(malformed_calls),
    )


def mixed(header: Header, version: int) -> str:
    """Return why a result is not entirely of `version`, or "" if it is."""
    held = sorted({*header.oldest, *header.newest})
    return "" if held == [version] else f"sampled by policy versions {held}, but the round is of version {version}"


def number_contexts(prompt: np.ndarray, contexts: Sequence[np.ndarray]) -> list[int]:
    """Return the number of each context [s]: 0 if it is empty or equals the prompt, otherwise from 1 as contexts first occur."""
    numbers = {b"": 0, _key(prompt): 0}
    before = len(numbers) - 1
    return [numbers.setdefault(_key(context), len(numbers) - before) for context in contexts]


def _key(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.int64).tobytes()


def pack_partial(completions: Sequence[Generated]) -> bytes:
    """Encode the `Partial` of an unfinished group."""
    finish = [c.finish if c.finish in ("stop", "length") else "" for c in completions]
    return codec.encode(Partial(finish, *_columns(completions)))


def unpack_partial(data: bytes | None, samples: int, max_tokens: int, vocabulary: int = MOST_TOKEN_IDS) -> list[Generated | None]:
    """Decode the tokens with which a ticket of `samples` completions was handed back: one entry per sample, None for samples to
    generate from the start. `vocabulary` is the number of token ids that the engine reads, which an id beyond would kill."""
    fresh: list[Generated | None] = [None] * samples
    if data is None:
        return fresh
    try:
        partial = codec.decode(data, Partial)
    except codec.CorruptMessage:
        return fresh
    lengths = partial.lengths
    whole = (
        len(partial.finish) == samples
        and lengths.shape == (samples,)
        and lengths.dtype == np.int32
        and bool((lengths >= 0).all())
        and bool((lengths <= max_tokens).all())
        and partial.tokens.shape == partial.logprobs.shape == (int(lengths.sum()),)
        and (partial.tokens.dtype, partial.logprobs.dtype) == (np.int32, np.float32)
        and partial.spans.dtype == partial.tool_spans.dtype == np.int32
        and bool(((partial.tokens >= 0) & (partial.tokens < vocabulary)).all())
        and partial.spans.ndim == 2
        and partial.spans.shape[1] == 4
        and partial.tool_spans.ndim == 2
        and partial.tool_spans.shape[1] == 3
        and len(partial.tool_spans) <= len(partial.tokens)
    )
    if not whole:
        return fresh
    starts = np.concatenate([[0], np.cumsum(lengths)])
    result: list[Generated | None] = []
    for sample, finish in enumerate(partial.finish):
        part = slice(int(starts[sample]), int(starts[sample + 1]))
        spans = [Span(int(v), int(a), int(b)) for s, v, a, b in partial.spans if s == sample]
        tool_spans = tuple((int(a), int(b)) for s, a, b in partial.tool_spans if s == sample)
        length = part.stop - part.start
        if length == 0 or not _tiles(spans, length) or not _apart(tool_spans, length):
            result.append(None)
        else:
            done = finish if finish in ("stop", "length") else "aborted"
            result.append(Generated(partial.tokens[part], partial.logprobs[part], spans, done, tool_spans))
    return result


def _flat(rollouts: Sequence[Sequence[Segment]]) -> list[Segment]:
    return [segment for rollout in rollouts for segment in rollout]


def _owners(rollouts: Sequence[Sequence[Segment]]) -> list[int]:
    """Return the rollout of each segment, or nothing if each rollout has one."""
    if all(len(rollout) == 1 for rollout in rollouts):
        return []
    return [number for number, rollout in enumerate(rollouts) for _ in rollout]


def _contexts(prompt: np.ndarray, segments: Sequence[Segment]) -> list[int]:
    return number_contexts(prompt, [segment.context for segment in segments])


def _tiles(spans: Sequence[Span], length: int) -> bool:
    """Return whether the spans cover [0, length) in order, without gap or overlap."""
    edges = [0, *(edge for span in spans for edge in (span.start, span.end)), length]
    whole = all(before == after for before, after in zip(edges[::2], edges[1::2], strict=True))
    return whole and all(span.version >= 0 and span.start < span.end for span in spans)


def _apart(spans: Sequence[tuple[int, int]], length: int) -> bool:
    """Return whether the spans are within [0, length), ascending, non-empty and disjoint."""
    return all(start < end for start, end in spans) and all(
        before <= after for before, after in pairwise([0, *(edge for span in spans for edge in span), length])
    )


def _columns(completions: Sequence[Generated]) -> tuple[np.ndarray, ...]:
    """Return lengths, tokens, logprobs, spans and tool spans, as `Payload` and `Partial` hold them."""
    lengths = np.array([len(c.tokens) for c in completions], np.int32)
    tokens = np.concatenate([c.tokens for c in completions]).astype(np.int32, copy=False)
    logprobs = np.concatenate([c.logprobs for c in completions]).astype(np.float32, copy=False)
    spans = [(i, span.version, span.start, span.end) for i, c in enumerate(completions) for span in c.spans]
    tool_spans = [(i, start, end) for i, c in enumerate(completions) for start, end in c.tool_spans]
    return lengths, tokens, logprobs, np.array(spans, np.int32).reshape(-1, 4), np.array(tool_spans, np.int32).reshape(-1, 3)
