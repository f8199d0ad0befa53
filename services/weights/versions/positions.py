"""Positions of changed elements as bytes: the gaps between them, or a bitmap.

Guarantees: what is decoded is strictly increasing, below the element count and as many as announced, or `InvalidVersion`;
decoding allocates in proportion to the announced counts, whatever the bytes are. Vectorised; imports numpy only.

A gap is the number of unchanged elements before a changed one. A byte below 255 ends a gap, 255 adds 255 to it and continues.
"""

from __future__ import annotations

import numpy as np

_MORE = 255


class InvalidVersion(RuntimeError):
    """Bytes of a version contradict its manifest, or the manifest contradicts itself."""


def gaps_nbytes(positions: np.ndarray) -> int:
    """Return the length of `encode_gaps(positions)`. `positions`: [changed] int64, strictly increasing."""
    return positions.size + int(((np.diff(positions, prepend=-1) - 1) // _MORE).sum())


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


def encode_bitmap(positions: np.ndarray, count: int) -> np.ndarray:
    """Return `positions`, [changed] int64 below `count`, as a bitmap, [⌈count / 8⌉] uint8."""
    changed = np.zeros(count, np.bool_)
    changed[positions] = True
    return np.packbits(changed, bitorder="little")


def decode_bitmap(encoded: np.ndarray, changed: int, count: int) -> np.ndarray:
    """Return the `changed` positions below `count`, [changed] int64. Raises `InvalidVersion`."""
    if encoded.size != -(-count // 8):
        raise InvalidVersion(f"a bitmap of {encoded.size} bytes is not one of {count} elements")
    bits = np.unpackbits(encoded, bitorder="little")
    positions = np.flatnonzero(bits)
    if positions.size != changed or (changed and positions[-1] >= count):
        raise InvalidVersion(f"a bitmap of {count} elements holds {positions.size} positions instead of {changed}")
    return positions
