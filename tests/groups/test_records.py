"""The conversion of completions to wire types and back, and partials made of untrusted bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.groups.generated import Generated, GenerationFailed, Segment, TurnTime
from services.groups.records import make_header, mixed, number_contexts, pack_partial, pack_payload, unpack_partial
from services.protocol import codec
from services.protocol.messages import Header, Span
from services.protocol.payloads import Partial, Payload
from tests.support.harness import ticket

COMPLETIONS = [
    Generated(np.array([1, 2, 3], np.int32), np.array([-1, -2, -3], np.float32), [Span(4, 0, 2), Span(5, 2, 3)], "stop"),
    Generated(np.array([9], np.int32), np.array([-0.5], np.float32), [Span(5, 0, 1)], "length"),
]


def _with_tools(length: int, *tool_spans: tuple[int, int]) -> Generated:
    tokens = np.arange(length, dtype=np.int32)
    return Generated(tokens, np.zeros(length, np.float32), [Span(0, 0, length)], "aborted", tool_spans)


def _whole(completions: list[Generated]) -> list[list[Segment]]:
    """Return rollouts with one segment each."""
    return [[Segment(completion)] for completion in completions]


TOOLS = [_with_tools(6, (1, 3), (3, 4)), _with_tools(2, (0, 2)), _with_tools(4)]
BAD_SPANS = [((2, 2),), ((3, 2),), ((-1, 2),), ((4, 7),), ((3, 5), (0, 2)), ((0, 3), (2, 4))]


def test_the_payload_concatenates_completions() -> None:
    payload = codec.decode(pack_payload(ticket(0, [7, 8], group_size=2), _whole(COMPLETIONS)), Payload)
    assert payload.prompt.tolist() == [7, 8]
    assert payload.lengths.tolist() == [3, 1]
    assert payload.tokens.tolist() == [1, 2, 3, 9]
    assert payload.logprobs.tolist() == [-1, -2, -3, -0.5]
    assert payload.spans.tolist() == [[0, 4, 0, 2], [0, 5, 2, 3], [1, 5, 0, 1]]


def test_the_header_has_what_dataprep_needs() -> None:
    header = make_header(
        ticket(3, group_size=2), _whole(COMPLETIONS), {"exact": [1.0, 0.0]}, [1.0, 0.0], [True, False],
        payload="0-3.1", payload_bytes=99, generator="g", generate_s=1.5, score_s=0.5,
    )  # fmt: skip
    assert (header.ticket, header.seq, header.lengths, header.truncated) == ("0-3", 3, [3, 1], [False, True])
    assert (header.oldest, header.newest, header.solved) == ([4, 5], [5, 5], [True, False])


def test_tool_spans_are_in_payload_and_header() -> None:
    given = ticket(0, [7, 8], group_size=3)
    payload = codec.decode(pack_payload(given, _whole(TOOLS)), Payload)
    header = make_header(
        given, _whole(TOOLS), {}, [0.0] * 3, [], payload="0-0.1", payload_bytes=9, generator="g", generate_s=1, score_s=0
    )
    assert payload.tool_spans.tolist() == [[0, 1, 3], [0, 3, 4], [1, 0, 2]]
    assert header.tool_tokens == [3, 2, 0]


def _segment(size: int, *context: int, finish: Literal["stop", "length"] = "stop", version: int = 0) -> Segment:
    generated = Generated(np.arange(size, dtype=np.int32), np.zeros(size, np.float32), [Span(version, 0, size)], finish)
    return Segment(generated, np.array(context, np.int32))


def _header(rollouts: list[list[Segment]], **fields: Any) -> Header:
    given, n = ticket(0, [7, 8], group_size=len(rollouts)), len(rollouts)
    return make_header(
        given, rollouts, {}, [0.0] * n, [], payload="0-0.1", payload_bytes=9, generator="e", generate_s=1, score_s=0, **fields
    )


def test_segments_are_stored_with_owners_and_contexts() -> None:
    rollouts = [
        [_segment(2), _segment(3, 9, 9, 9), _segment(1, 5, finish="length", version=4)],
        [_segment(4, 7, 8)],
        [_segment(1, 9, 9, 9), _segment(2)],
    ]
    header = _header(rollouts, turns=[3, 1, 2], tool_s=[0.5, 0.0, 0.25], tool_calls=[2, 0, 1], malformed_calls=[0, 0, 1])
    assert (header.lengths, header.owners) == ([2, 3, 1, 4, 1, 2], [0, 0, 0, 1, 2, 2])
    assert (header.context_tokens, header.contexts) == ([0, 3, 1, 0, 3, 0], [0, 1, 2, 0, 1, 0])
    assert header.context_sizes == [2, 3, 1, 2, 3, 2]
    assert (header.truncated, header.newest) == ([True, False, False], [0, 0, 4, 0, 0, 0])
    assert (header.turns, header.tool_s) == ([3, 1, 2], [0.5, 0.0, 0.25])
    assert (header.tool_calls, header.malformed_calls) == ([2, 0, 1], [0, 0, 1])
    payload = codec.decode(pack_payload(ticket(0, [7, 8], group_size=3), rollouts, ["a", "b", "c"]), Payload)
    assert (payload.owners.tolist(), payload.notes) == (header.owners, ["a", "b", "c"])
    assert [context.tolist() for context in payload.own_contexts] == [[], [9, 9, 9], [5], [], [9, 9, 9], []]
    assert number_contexts(payload.prompt, payload.own_contexts) == header.contexts
    assert {column.dtype for column in (payload.rollout, payload.context_lengths, payload.context)} == {np.dtype(np.int32)}


def test_single_segment_rollouts_have_no_extra_columns() -> None:
    for rollouts in (_whole(COMPLETIONS), [[_segment(2, 7, 8)], [_segment(1)]]):
        header = _header(rollouts)
        assert (header.rollout, header.context_tokens, header.contexts) == ([], [], [])
        assert (header.owners, header.context_numbers, header.context_sizes) == ([0, 1], [0, 0], [2, 2])
        payload = codec.decode(pack_payload(ticket(0, [7, 8], group_size=2), rollouts), Payload)
        assert [len(column) for column in (payload.rollout, payload.context_lengths, payload.context)] == [0, 0, 0]
        assert (payload.owners.tolist(), [len(context) for context in payload.own_contexts]) == ([0, 1], [0, 0])


def test_truncation_is_that_of_the_last_segment_unless_given() -> None:
    rollouts = [[_segment(2, finish="length"), _segment(1)], [_segment(1, finish="length")]]
    assert _header(rollouts).truncated == [False, True]
    assert _header(rollouts, truncated=[True, False]).truncated == [True, False]


def test_a_rollout_without_segments_is_a_failure() -> None:
    with pytest.raises(GenerationFailed, match="rollout 1 has no segment"):
        pack_payload(ticket(0, group_size=2), [[_segment(1)], []])


@pytest.mark.parametrize("spans", BAD_SPANS)
def test_invalid_tool_spans_fail_the_completion(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(GenerationFailed, match=r"completion 1 has 6 tokens and tool spans .*generator\.engine"):
        pack_payload(ticket(0, group_size=2), _whole([TOOLS[0], _with_tools(6, *spans)]))


def test_a_partial_keeps_tool_spans() -> None:
    back = unpack_partial(pack_partial(TOOLS), 3, max_tokens=16)
    assert [part.tool_spans for part in back if part is not None] == [one.tool_spans for one in TOOLS]


@pytest.mark.parametrize("spans", BAD_SPANS)
def test_a_partial_with_invalid_tool_spans_restarts(spans: tuple[tuple[int, int], ...]) -> None:
    back = unpack_partial(pack_partial([TOOLS[0], _with_tools(6, *spans)]), 2, max_tokens=16)
    assert [part is None for part in back] == [False, True]


@pytest.mark.parametrize("shape", [(4,), (2, 4), (30, 3)])
def test_misshapen_tool_spans_void_the_partial(shape: tuple[int, ...]) -> None:
    whole = codec.decode(pack_partial(TOOLS), Partial)
    strange = codec.encode(msgspec.structs.replace(whole, tool_spans=np.ones(shape, np.int32)))
    assert unpack_partial(strange, 3, max_tokens=16) == [None] * 3


def test_a_partial_round_trips() -> None:
    halfway = Generated(np.array([6, 7], np.int32), np.array([-1, -1], np.float32), [Span(2, 0, 2)], "aborted")
    nothing = Generated(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "aborted")
    data = pack_partial([COMPLETIONS[0], halfway, nothing])
    done, begun, fresh = unpack_partial(data, 3, max_tokens=16)
    assert done is not None
    assert (done.tokens.tolist(), done.finish, done.spans) == ([1, 2, 3], "stop", COMPLETIONS[0].spans)
    assert begun is not None
    assert (begun.tokens.tolist(), begun.finish) == ([6, 7], "aborted")
    assert fresh is None


def test_a_partial_with_other_sizes_is_ignored() -> None:
    data = pack_partial(COMPLETIONS)
    assert unpack_partial(data, 3, 16) == [None] * 3
    assert unpack_partial(data, 2, 2) == [None] * 2
    assert None not in unpack_partial(data, 2, 3)  # the longest has 3 tokens
    assert unpack_partial(None, 2, 16) == [None] * 2


def test_a_partial_with_ids_that_the_model_does_not_have_is_ignored() -> None:
    data = pack_partial(COMPLETIONS)  # token ids up to 9
    assert unpack_partial(data, 2, 16, vocabulary=9) == [None] * 2
    assert None not in unpack_partial(data, 2, 16, vocabulary=10)


@pytest.mark.parametrize(
    "spans", [[Span(-1, 0, 3)], [Span(4, 0, 0), Span(4, 0, 3)], [Span(4, 0, 2)], [Span(4, 0, 2), Span(4, 1, 3)]]
)
def test_a_completion_with_impossible_version_spans_restarts(spans: list[Span]) -> None:
    data = pack_partial([replace(COMPLETIONS[0], spans=spans), COMPLETIONS[1]])
    assert [part is None for part in unpack_partial(data, 2, 16)] == [True, False]


def test_turns_are_stored_with_the_place_of_their_segment() -> None:
    turns = (TurnTime(2, 0.0, 0.5), TurnTime(3, 0.25, 1.0))
    rollouts = [[_segment(2)], [_segment(1), Segment(_segment(3).completion, turns=turns)]]
    payload = codec.decode(pack_payload(ticket(0, group_size=2), rollouts), Payload)
    assert payload.turns.tolist() == [[2, 2, 0.0, 0.5], [2, 3, 0.25, 1.0]]
    assert codec.decode(pack_payload(ticket(0, group_size=2), _whole(COMPLETIONS)), Payload).turns.shape == (0, 4)


def test_a_round_takes_groups_of_its_version_only() -> None:
    assert mixed(_header([[_segment(1, version=4)], [_segment(2, version=4)]]), 4) == ""
    other = mixed(_header([[_segment(1, version=4)], [_segment(2, version=3)]]), 4)
    assert other == "sampled by policy versions [3, 4], but the round is of version 4"


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 255))
def test_arbitrary_bytes_never_crash_the_reader(noise: bytes, position: int, value: int) -> None:
    good = bytearray(pack_partial([TOOLS[0], COMPLETIONS[1]]))
    good[position % len(good)] = value
    for data in (noise, bytes(good)):
        for part in unpack_partial(data, 2, 16):
            if part is not None:
                assert len(part.tokens) == len(part.logprobs) == sum(s.end - s.start for s in part.spans)
                inside = [place for start, end in part.tool_spans for place in range(start, end)]
                assert len(set(inside)) == len(inside)
                assert set(inside) <= set(range(len(part.tokens)))
