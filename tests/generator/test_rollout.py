"""Completions to wire types and back, and partials whose bytes cannot be trusted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.generator.engine import Generated
from services.generator.rollout import make_header, pack_partial, pack_payload, unpack_partial
from services.protocol import codec
from services.protocol.messages import Payload, Span
from tests.harness import ticket

COMPLETIONS = [
    Generated(np.array([1, 2, 3], np.int32), np.array([-1, -2, -3], np.float32), [Span(4, 0, 2), Span(5, 2, 3)], "stop"),
    Generated(np.array([9], np.int32), np.array([-0.5], np.float32), [Span(5, 0, 1)], "length"),
]


def test_payload_lays_completions_end_to_end() -> None:
    payload = codec.decode(pack_payload(ticket(0, [7, 8], group_size=2), COMPLETIONS), Payload)
    assert payload.prompt.tolist() == [7, 8]
    assert payload.lengths.tolist() == [3, 1]
    assert payload.tokens.tolist() == [1, 2, 3, 9]
    assert payload.logprobs.tolist() == [-1, -2, -3, -0.5]
    assert payload.spans.tolist() == [[0, 4, 0, 2], [0, 5, 2, 3], [1, 5, 0, 1]]


def test_header_says_what_dataprep_decides_on() -> None:
    header = make_header(
        ticket(3, group_size=2), COMPLETIONS, {"exact": [1.0, 0.0]}, [1.0, 0.0],
        payload="0-3.1", payload_bytes=99, generator="g", generate_s=1.5, score_s=0.5,
    )  # fmt: skip
    assert (header.ticket, header.seq, header.lengths, header.truncated) == ("0-3", 3, [3, 1], [False, True])
    assert (header.oldest, header.newest) == ([4, 5], [5, 5])


def test_a_partial_comes_back_as_it_was_saved() -> None:
    halfway = Generated(np.array([6, 7], np.int32), np.array([-1, -1], np.float32), [Span(2, 0, 2)], "aborted")
    nothing = Generated(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "aborted")
    data = pack_partial([COMPLETIONS[0], halfway, nothing])
    done, begun, fresh = unpack_partial(data, ticket(0, group_size=3), max_tokens=16)
    assert done is not None
    assert (done.tokens.tolist(), done.finish, done.spans) == ([1, 2, 3], "stop", COMPLETIONS[0].spans)
    assert begun is not None
    assert (begun.tokens.tolist(), begun.finish) == ([6, 7], "aborted")
    assert fresh is None


def test_a_partial_of_another_shape_is_ignored() -> None:
    data = pack_partial(COMPLETIONS)
    assert unpack_partial(data, ticket(0, group_size=3), 16) == [None] * 3
    assert unpack_partial(data, ticket(0, group_size=2), 2) == [None] * 2
    assert unpack_partial(None, ticket(0, group_size=2), 16) == [None] * 2


@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 255))
def test_no_bytes_can_break_the_reader(noise: bytes, position: int, value: int) -> None:
    good = bytearray(pack_partial(COMPLETIONS))
    good[position % len(good)] = value
    for data in (noise, bytes(good)):
        for part in unpack_partial(data, ticket(0, group_size=2), 16):
            assert part is None or len(part.tokens) == len(part.logprobs) == sum(s.end - s.start for s in part.spans)
