"""Bit changes: exact for any bits, in the smallest encoding, and safe to decode from any bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from services.weights.versions import pieces
from services.weights.versions.catalogue import InvalidVersion
from services.weights.versions.encoder import bits

UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)
CUTS = (0.0, 0.001, 0.02, 0.3, 0.97, 1.0)


@st.composite
def changes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Return elements and a copy of which a share differs, arbitrarily or by one unit in the last place."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype, count = draw(st.sampled_from(UNSIGNED)), draw(st.integers(0, 3000))
    old = random.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)
    steps = random.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True) if draw(st.booleans()) else np.ones(count, dtype)
    change = random.random(count) < draw(st.sampled_from(CUTS))
    return old, np.where(change, old + steps, old).astype(dtype)


def restored(encoded: pieces.EncodedPiece, old: np.ndarray) -> np.ndarray:
    blocks = [(memoryview(stored), raw, compressed) for stored, raw, compressed in encoded.blocks]
    change = pieces.decode(encoded.encoding, encoded.changed, blocks, old.size, old.dtype)
    new = old.copy()
    back = change.back(old)
    change.put(new)
    again = new.copy()
    back.put(again)
    assert np.array_equal(again, old)
    return new


@settings(max_examples=150, deadline=None)
@given(changes())
def test_any_change_round_trips_bitwise(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = pair
    encoded = pieces.encode(new, old)
    assert np.array_equal(restored(encoded, old), new)
    assert encoded.nbytes <= new.nbytes, "never more than the elements themselves"
    assert encoded.changed == (new.size if encoded.encoding == "whole" else np.count_nonzero(new != old))
    assert np.array_equal(pieces.changed_positions(new, old), np.flatnonzero(new != old))
    assert np.array_equal(restored(pieces.encode(new, None), old), new)


def special(dtype: torch.dtype) -> torch.Tensor:
    """Return every kind of value whose bits a float comparison would confuse."""
    integer = torch.int16 if dtype.itemsize == 2 else torch.int32
    quiet = torch.tensor([float("nan"), 0.0, -0.0, float("inf"), float("-inf"), 1.0]).to(dtype).view(integer)
    return torch.cat([quiet, quiet | 5, quiet ^ 1]).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_payloads_of_nan_and_signed_zeros_are_kept(dtype: torch.dtype) -> None:
    values = special(dtype)
    base = torch.zeros(4096, dtype=dtype)
    other = base.clone()
    other[100 : 100 + len(values)] = values
    other[7] = -0.0
    old, new = bits(base), bits(other)
    encoded = pieces.encode(new, old)
    assert encoded.encoding == "gaps"
    assert np.array_equal(restored(encoded, old), new)
    assert restored(encoded, old)[7] != 0, "-0.0 is not 0.0"


@pytest.mark.parametrize(
    ("share", "step", "encoding"),
    [(0.0, 1, "same"), (0.01, 1, "gaps"), (0.3, 1, "gaps"), (1.0, 1, "dense"), (1.0, 0, "whole")],
)
def test_the_smallest_encoding_is_chosen(share: float, step: int, encoding: str) -> None:
    random = np.random.default_rng(3)
    old = random.integers(0, 2**16, 100_000, np.uint16)
    change = random.random(old.size) < share
    new = np.where(change, old + 1 if step else random.integers(0, 2**16, old.size, np.uint16), old).astype(np.uint16)
    encoded = pieces.encode(new, old)
    assert encoded.encoding == encoding
    assert np.array_equal(restored(encoded, old), new)


def test_a_fiftieth_of_the_weights_costs_about_a_byte_each() -> None:
    random = np.random.default_rng(4)
    old = random.integers(0, 2**16, 1 << 20, np.uint16)
    change = random.random(old.size) < 0.02
    new = (old + np.where(change, random.choice(np.array([1, 2**16 - 1], np.uint16), old.size), 0)).astype(np.uint16)
    encoded = pieces.encode(new, old)
    assert encoded.nbytes < 1.2 * np.count_nonzero(change)
    assert np.array_equal(restored(encoded, old), new)


@settings(max_examples=200, deadline=None)
@given(changes(), st.data())
def test_damaged_blocks_are_rejected_or_change_only_their_piece(pair: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    old, new = pair
    encoded = pieces.encode(new, old)
    blocks = [(bytearray(stored), raw, compressed) for stored, raw, compressed in encoded.blocks]
    if not any(stored for stored, _, _ in blocks):
        return
    stored = data.draw(st.sampled_from([stored for stored, _, _ in blocks if stored]))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    before = old.copy()
    try:
        change = pieces.decode(
            encoded.encoding, encoded.changed, [(memoryview(s), r, c) for s, r, c in blocks], old.size, old.dtype
        )
    except InvalidVersion:
        pass
    else:
        assert change.values.dtype == old.dtype
        assert old[change.where].shape == change.values.shape
        back = change.back(old)
        change.put(old)
        back.put(old)
        assert np.array_equal(old, before)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 100), st.integers(0, 5000))
def test_any_bytes_decode_to_positions_in_range_or_none(encoded: bytes, changed: int, count: int) -> None:
    try:
        found = pieces.decode_gaps(np.frombuffer(encoded, np.uint8), changed, count)
    except InvalidVersion:
        return
    assert found.size == changed
    assert np.all(np.diff(found) > 0)
    assert changed == 0 or (found[0] >= 0 and found[-1] < count)


def test_a_block_larger_than_announced_is_not_decompressed() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(InvalidVersion, match="a compressed block of 67108864 bytes instead of 8"):
        pieces.decode("dense", 8, [(memoryview(bomb), 8, True)], 8, np.dtype(np.uint8))
    huge = bytes.fromhex("28b52ffde0") + (1 << 40).to_bytes(8, "little")  # a frame's magic number, what follows, and its size
    with pytest.raises(InvalidVersion, match="a compressed block of 1099511627776 bytes instead of 8"):
        pieces.decode("dense", 8, [(memoryview(huge), 8, True)], 8, np.dtype(np.uint8))
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 26))
    with pytest.raises(InvalidVersion):
        pieces.decode("dense", 8, [(memoryview(streamed), 8, True)], 8, np.dtype(np.uint8))


FRAME = zstandard.ZstdCompressor().compress(bytes(8))


@pytest.mark.parametrize(
    ("encoding", "changed", "block", "message"),
    [
        ("dense", 8, (bytes([2] * 9), 8, False), "a block of 9 bytes instead of 8"),
        ("dense", 7, (bytes([2] * 8), 8, False), "another number of elements than announced"),
        ("dense", 0, (FRAME + b"more", 8, True), "a damaged block: "),
        ("dense", 0, (FRAME[:-1], 8, True), "a damaged block: "),
        ("dense", 0, (b"no frame", 8, True), "a damaged block: "),
        ("thin", 0, (bytes(8), 8, False), "unknown encoding 'thin'"),
    ],
)
def test_contradictions_are_rejected(encoding: str, changed: int, block: tuple[bytes, int, bool], message: str) -> None:
    stored, *rest = block
    with pytest.raises(InvalidVersion, match=message):
        pieces.decode(encoding, changed, [(memoryview(stored), *rest)], 8, np.dtype(np.uint8))


@given(st.sets(st.integers(0, 2000), max_size=40))
def test_positions_are_decoded_up_to_the_last_element_and_not_beyond(where: set[int]) -> None:
    count = max(where, default=0) + 1
    gaps = pieces.encode_gaps(np.array(sorted(where), np.int64))
    assert pieces.decode_gaps(gaps, len(where), count).tolist() == sorted(where)
    if where:
        with pytest.raises(InvalidVersion, match=f"position {count - 1} is beyond the {count - 1} elements"):
            pieces.decode_gaps(gaps, len(where), count - 1)
