"""A delta whose bytes are here, and what it changes.

Guarantees: every part has come once and has the size that the manifest says, or `InvalidVersion`; what is decoded has the sizes
that manifest.py has checked, and needs nothing but the delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from services.weights.versions.manifest import TensorPiece, VersionManifest
from services.weights.versions.pieces import Change, decode
from services.weights.versions.positions import InvalidVersion

GROUP = 1 << 21
"""Minimum number of elements in a group."""


class Delta:
    """A delta, whole."""

    def __init__(self, manifest: VersionManifest, parts: Iterable[tuple[int, memoryview]]) -> None:
        """`parts`: index and bytes of every part, in any order, once each. Raises `InvalidVersion`, or what `parts` raises."""
        self.manifest = manifest
        self._data = dict[int, memoryview]()
        for index, part in parts:
            if index in self._data or index >= len(manifest.parts) or len(part) != manifest.parts[index].nbytes:
                raise InvalidVersion(f"a part of version {manifest.version} has {len(part)} bytes, or was not awaited")
            self._data[index] = part
        if len(self._data) < len(manifest.parts):
            raise InvalidVersion(f"version {manifest.version} lacks {len(manifest.parts) - len(self._data)} of its parts")

    def change(self, place: int) -> Change:
        """Return what changes in the piece at that place of the manifest. Raises `InvalidVersion`."""
        piece, blocks = self.manifest.pieces[place], list[tuple[memoryview, int, bool]]()
        start = piece.offset
        for block in piece.blocks:
            blocks.append((self._data[piece.part][start : start + block.stored], block.raw, block.compressed))
            start += block.stored
        kind = np.dtype(f"u{getattr(torch, self.manifest.tensors[piece.tensor].dtype).itemsize}")
        return decode(piece.encoding, piece.changed, blocks, piece.count, kind)


def groups(pieces: Sequence[TensorPiece], places: Iterable[int]) -> Iterator[list[int]]:
    """Yield the places of pieces in groups that are worth a thread's while, at least one."""
    group, elements = list[int](), 0
    for place in places:
        group.append(place)
        elements += pieces[place].count
        if elements >= GROUP:
            yield group
            group, elements = [], 0
    if group:
        yield group


def alike(manifests: Sequence[VersionManifest]) -> bool:
    """Return whether all have the same tensors in the same pieces, as the versions of one trainer do."""
    first, *others = ([(piece.tensor, piece.start, piece.count) for piece in each.pieces] for each in manifests)
    return all(runs == first for runs in others) and all(each.tensors == manifests[0].tensors for each in manifests)
