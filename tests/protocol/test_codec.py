"""The wire format: messages round-trip; damaged ones are rejected cheaply and always with the same kind of error."""

from __future__ import annotations

import random
import tracemalloc
import types
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.protocol.codec import SEAL_BYTES, CorruptMessage, decode, encode, seal, unseal
from services.protocol.messages import Header, PodStatus, RankPlan, Round, Sample, Span, StepPlan, Ticket
from services.protocol.payloads import Partial, Payload
from tests.support.harness import ticket

MUTATIONS = 10_000
MEMORY_LIMIT = 16 << 20  # bytes; damaged messages are about a hundred bytes each, and all errors are kept
FLOATS = st.floats(allow_nan=False)
INTS = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
PLAIN = {int: INTS, float: FLOATS, str: st.text(), bool: st.booleans()}


@st.composite
def arrays(draw: Any) -> np.ndarray:
    """Draw int32 or float32 arrays of one or two dimensions, including empty ones and NaN."""
    if draw(st.booleans()):
        flat = np.array(draw(st.lists(INT32, max_size=12)), np.int32)
    else:
        flat = np.array(draw(st.lists(st.floats(width=32), max_size=12)), np.float32)
    return flat.reshape(-1, 2) if len(flat) % 2 == 0 and draw(st.booleans()) else flat


def messages(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Draw a random message of a type, built from its annotations."""
    return st.builds(kind, **{field.name: values(field.type) for field in msgspec.structs.fields(kind)})


def values(annotation: Any) -> st.SearchStrategy[Any]:
    if annotation is np.ndarray:
        return arrays()
    if isinstance(annotation, types.UnionType):
        return st.one_of(*(st.none() if kind is types.NoneType else values(kind) for kind in annotation.__args__))
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin, arguments = getattr(annotation, "__origin__", None), getattr(annotation, "__args__", ())
    if origin is list:
        return st.lists(values(arguments[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    return messages(annotation)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(equal(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    return a == b


@pytest.mark.parametrize("kind", [Ticket, Header, Payload, Partial, Span, Sample, RankPlan, StepPlan, PodStatus, Round])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_message_round_trips(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert equal(decode(encode(message), kind), message)


def example() -> dict[type[msgspec.Struct], bytes]:
    lengths = np.array([3, 2], np.int32)
    spans = np.array([[0, 0, 0, 3], [1, 1, 0, 2]], np.int32)
    columns = (lengths, np.arange(5, dtype=np.int32), np.linspace(-2, 0, 5, dtype=np.float32), spans)
    header = Header(
        "0-1", 1, 0, 1, "0-1.17", 99, 3, [3, 2], [0.5, 1.0], {"math": [0.5, 1.0]}, [False, True], [0, 1], [1, 1], "g0", 0.5, 0.1,
        "main", [0, 0],
    )  # fmt: skip
    plan = StepPlan(3, ["0-1"], ["0-1"], 1, 1, [1], [5.0], 5, 11, {"reward/train/mean": 0.75})
    return {
        Ticket: encode(ticket(1)),
        Header: encode(header),
        Payload: encode(Payload(np.array([1, 2, 3], np.int32), *columns)),
        Partial: encode(Partial(["stop", ""], *columns)),
        StepPlan: encode(plan),
        RankPlan: encode(RankPlan([[Sample("0-1.17", 0, -0.5, 3)], []])),
    }  # fmt: skip


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Flip, drop or insert one to three bytes, or cut off the end; occasionally return something that was never a message."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(64))
    bytes_ = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(bytes_) + 1)
        match rng.randrange(4):
            case 0:
                bytes_[at : at + 1] = rng.randbytes(1)
            case 1:
                del bytes_[at : at + rng.randint(1, 8)]
            case 2:
                bytes_[at:at] = rng.choice(
                    [b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc1", b"\xd6\xff1234"]
                )
            case _:
                del bytes_[at:]
    return bytes(bytes_)


def test_damaged_bytes_are_valid_or_corrupt() -> None:
    rng, examples = random.Random(0), example()
    refusals: list[tuple[type[msgspec.Struct], CorruptMessage]] = []
    tracemalloc.start()
    try:
        for _ in range(MUTATIONS):
            kind = rng.choice(list(examples))
            try:
                assert isinstance(decode(damaged(examples[kind], rng), kind), kind)
            except CorruptMessage as refusal:
                refusals.append((kind, refusal.with_traceback(None)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(refusals) > MUTATIONS / 2
    assert all(str(refusal).startswith(f"not a {kind.__name__}: ") for kind, refusal in refusals)
    assert peak < MEMORY_LIMIT


BINARY = b"\x00" * 8


@pytest.mark.parametrize(
    "array",
    [
        ["i", [2**62], BINARY], ["i", [2**64 - 1], BINARY], ["i", [2**31, 2**31], b""], ["i", [3], BINARY], ["i", [-2], BINARY],
        ["i", [2.0], BINARY], ["i", [2], BINARY + b"\x00"], ["d", [1], BINARY], [["i"], [2], BINARY], ["i", 2, BINARY],
        ["i", [2], "text"], ["i", [2], [0] * 8], ["i", [2]], ["i", [0] * 100, b""], {"i": [2]}, None, 7, b"bytes",
    ],
)  # fmt: skip
def test_inconsistent_arrays_are_rejected(array: Any) -> None:
    good = np.zeros(2, np.int32)
    data = msgspec.msgpack.encode([array, *(["i", [2], BINARY] for _ in range(4))])
    assert equal(decode(encode(Payload(good, good, good, good, good)), Payload).lengths, good)
    with pytest.raises(CorruptMessage, match="not a Payload"):
        decode(data, Payload)


def test_deep_nesting_is_rejected() -> None:
    with pytest.raises(CorruptMessage):
        decode(b"\x95" + b"\x91" * 100_000, Payload)


def test_arrays_of_other_types_are_not_encoded() -> None:
    bad = np.zeros(2, np.float64)
    with pytest.raises(TypeError, match="arrays in messages must be int32 or float32, not float64"):
        encode(Payload(bad, bad, bad, bad, bad))
    with pytest.raises(TypeError, match="complex cannot be encoded"):
        encode([1j])


def test_decoded_arrays_are_read_only_views() -> None:
    data = example()[Payload]
    payload = decode(data, Payload)
    assert not payload.tokens.flags.writeable
    assert not payload.tokens.flags.owndata
    assert encode(payload) == data


@given(st.binary(max_size=50), st.integers(0, 1000))
def test_a_changed_bit_breaks_the_seal(data: bytes, bit: int) -> None:
    sealed = bytearray(seal(data))
    assert bytes(unseal(bytes(sealed))) == data
    sealed[bit // 8 % len(sealed)] ^= 1 << bit % 8
    with pytest.raises(CorruptMessage, match=f"its {len(sealed)} bytes are not those that were written: the checksum differs"):
        unseal(bytes(sealed))


@pytest.mark.parametrize("length", range(SEAL_BYTES))
def test_too_few_bytes_are_not_sealed(length: int) -> None:
    with pytest.raises(CorruptMessage, match="the checksum differs"):
        unseal(bytes(length))
