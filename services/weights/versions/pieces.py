"""Encodes what changed in one run of elements since the base, in whichever way is smallest, and decodes it.

Guarantees: encoding and decoding are exact for any bits, NaN payloads and signed zeros included, because elements are unsigned
integers here; decoding checks every size before it allocates and every position before it is used, and changes nothing itself.

A difference is new - old modulo 2^bits, folded so that small negative ones are small too (zigzag), one block for each of its
bytes: a step of training moves most weights by one unit in the last place, so all bytes but the lowest are zero. Positions are
the gaps between changed elements: the number of unchanged elements before each. A byte below 255 ends a gap, 255 adds 255 to it
and continues. Blocks are compressed by zstd where that makes them smaller. Works on host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import zstandard

from services.weights.versions.catalogue import InvalidVersion

LEVEL = 1  # of zstd: higher ones gained nothing on gaps and differences
PAYS = 0.95  # a block is stored compressed below this share of its size
_MORE = 255  # a byte that continues a gap
_STRIDE = 1 << 20  # bytes compared at a time, which stay in the L2 cache: twice as fast as all at once


class _Own(threading.local):
    """Objects of each thread: creating a decompressor takes as long as using it."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_own = _Own()


@dataclass(frozen=True)
class EncodedPiece:
    """An encoded run of elements."""

    encoding: str
    changed: int
    blocks: list[tuple[bytes | memoryview, int, bool]]  # stored bytes, raw size, whether compressed

    @property
    def nbytes(self) -> int:
        """Return the stored bytes."""
        return sum(len(stored) for stored, _, _ in self.blocks)


UNCHANGED = EncodedPiece("same", 0, [])


def changed_positions(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return where `new` and `old` differ, [changed] int64. Both: [count] of the same unsigned type, contiguous."""
    stride = _STRIDE // new.itemsize
    starts = range(0, new.size, stride)
    found = [_differing(new[start : start + stride], old[start : start + stride]) + start for start in starts]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def encode(new: np.ndarray, old: np.ndarray | None) -> EncodedPiece:
    """Return the piece with the elements `new`, as a change of `old` unless that is None. Both: [count] unsigned."""
    whole = EncodedPiece("whole", new.size, [(new.data.cast("B") if new.size else b"", new.nbytes, False)])
    if old is None:
        return whole
    positions = changed_positions(new, old)
    if not positions.size:
        return UNCHANGED
    gaps = encode_gaps(positions)
    if positions.size * new.itemsize + gaps.size >= new.nbytes:
        encoding, blocks, differences = "dense", list[np.ndarray](), _folded(new - old)
    else:
        encoding, blocks, differences = "gaps", [gaps], _folded(new[positions] - old[positions])
    encoded = EncodedPiece(encoding, positions.size, [_stored(block) for block in [*blocks, *_bytes_of(differences)]])
    return encoded if encoded.nbytes < new.nbytes else whole


@dataclass(frozen=True)
class Change:
    """Elements that change, whatever the base is."""

    where: np.ndarray | slice
    """Positions, [changed] int64, or a run of elements."""
    values: np.ndarray
    """In the order of `where`."""
    added: bool
    """Whether the values are differences, which are added to the base's elements, or the elements themselves."""

    def put(self, elements: np.ndarray) -> None:
        """Bring a base's elements, [count] unsigned, to the new ones."""
        if not isinstance(self.where, slice):  # of numpy's alternatives, one takes twice as long and one holds the GIL
            signed = np.dtype(f"i{elements.itemsize}")
            target, values = (torch.from_numpy(array.view(signed)) for array in (elements, self.values))
            target.scatter_add_(0, torch.from_numpy(self.where), values)
        elif self.added:
            elements[self.where] += self.values
        else:
            elements[self.where] = self.values

    def back(self, elements: np.ndarray) -> Change:
        """Return the change that undoes this one, given the base's elements."""
        if self.added:
            return Change(self.where, -self.values, added=True)
        return Change(self.where, elements[self.where].copy(), added=False)


def decode(encoding: str, changed: int, blocks: Sequence[tuple[memoryview, int, bool]], count: int, kind: np.dtype) -> Change:
    """Return which of `count` elements of the unsigned type `kind` change, and how.

    Raises `InvalidVersion`.
    """
    raw = [_restored(*block) for block in blocks]
    match encoding:
        case "same":
            return Change(slice(0, 0), np.zeros(0, kind), added=True)
        case "whole":
            return Change(slice(None), raw[0].view(kind), added=False)
        case "dense":
            differences = _unfolded(_joined(raw, kind))
            if int(np.count_nonzero(differences)) != changed:
                raise InvalidVersion("the differences change another number of elements than announced")
            return Change(slice(None), differences, added=True)
        case "gaps":
            positions = decode_gaps(raw[0], changed, count)
        case _:
            raise InvalidVersion(f"unknown encoding {encoding!r}")
    return Change(positions, _unfolded(_joined(raw[1:], kind)), added=True)


def encode_gaps(positions: np.ndarray) -> np.ndarray:
    """Return `positions`, [changed] int64, strictly increasing, as gaps, [bytes] uint8."""
    gaps = np.diff(positions, prepend=-1) - 1
    continued, rest = np.divmod(gaps, _MORE)
    ends = np.cumsum(continued + 1) - 1
    encoded = np.full(ends[-1] + 1 if ends.size else 0, _MORE, np.uint8)
    encoded[ends] = rest
    return encoded


def decode_gaps(encoded: np.ndarray, changed: int, count: int) -> np.ndarray:
    """Return the `changed` positions below `count`, [changed] int64. Raises `InvalidVersion`."""
    ends = encoded != _MORE
    found = int(np.count_nonzero(ends))
    if found != changed or (encoded.size and encoded[-1] == _MORE):
        raise InvalidVersion(f"gaps hold {found} positions instead of {changed}")
    positions = np.cumsum(encoded + ends.view(np.uint8).astype(np.uint16), dtype=np.int64)  # each end is an element, too
    if found < positions.size:
        positions = positions[ends]
    positions -= 1
    if changed and positions[-1] >= count:
        raise InvalidVersion(f"position {positions[-1]} is beyond the {count} elements")
    return positions


def _differing(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return where they differ. Compares words of 8 bytes first, since most are equal."""
    per_word = 8 // new.itemsize
    words = new.size // per_word
    if per_word == 1 or not words or new.ctypes.data % 8 or old.ctypes.data % 8:
        return np.flatnonzero(new != old)
    bulk = words * per_word
    ours, base = new[:bulk].view(np.uint64), old[:bulk].view(np.uint64)
    differ = np.flatnonzero(ours != base)
    inside = np.flatnonzero((ours[differ] ^ base[differ]).view(new.dtype))
    found = differ[inside // per_word] * per_word + inside % per_word
    return np.concatenate([found, np.flatnonzero(new[bulk:] != old[bulk:]) + bulk]) if bulk < new.size else found


def _folded(differences: np.ndarray) -> np.ndarray:
    """Return zigzag codes: 0, -1, 1, -2 … as 0, 1, 2, 3 …"""
    signed = differences.view(np.dtype(f"i{differences.itemsize}"))
    return ((signed << 1) ^ (signed >> (8 * differences.itemsize - 1))).view(differences.dtype)


def _unfolded(codes: np.ndarray) -> np.ndarray:
    one = codes.dtype.type(1)
    return (codes >> one) ^ (~(codes & one) + one)


def _bytes_of(codes: np.ndarray) -> list[np.ndarray]:
    """Return one array for each byte of the codes, the lowest first."""
    table = np.ascontiguousarray(codes.astype(codes.dtype.newbyteorder("<"), copy=False)).view(np.uint8).reshape(codes.size, -1)
    return [np.ascontiguousarray(table[:, i]) for i in range(codes.itemsize)]


def _joined(columns: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return np.stack(columns, axis=1).reshape(-1).view(dtype.newbyteorder("<")).astype(dtype, copy=False)


def _stored(block: np.ndarray) -> tuple[bytes, int, bool]:
    raw = block.tobytes()
    compressed = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(raw)
    return (compressed, len(raw), True) if len(compressed) < PAYS * len(raw) else (raw, len(raw), False)


def _restored(stored: memoryview, raw: int, compressed: bool) -> np.ndarray:
    """Return [raw] uint8. A frame that announces another size is not decompressed."""
    if not compressed:
        if len(stored) != raw:
            raise InvalidVersion(f"a block of {len(stored)} bytes instead of {raw}")
        return np.frombuffer(stored, np.uint8)
    try:
        announced = zstandard.get_frame_parameters(stored).content_size
        if announced != raw:
            raise InvalidVersion(f"a compressed block of {announced} bytes instead of {raw}")
        restored = _own.decompressor.decompress(stored, allow_extra_data=False)  # as many bytes as announced, or an error
    except zstandard.ZstdError as error:
        raise InvalidVersion(f"a damaged block: {error}") from None
    return np.frombuffer(restored, np.uint8)
