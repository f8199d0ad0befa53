"""A receiver's copy of the tensors of one version, in host memory, to which deltas are applied.

Guarantees: `apply` either ends with every tensor at the version's bits, each piece compared with its checksum, or raises
and leaves what was there: a delta is undone, an anchor leaves nothing. What is applied has been checked: sizes by the manifest,
positions and blocks as they are decoded. Bytes that come from outside may be anything.
Cost: one copy of the tensors, and while a delta is applied the values that it replaces.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from services.weights.checksums import WeightChanged, checksums
from services.weights.collective import TensorMeta, huge_pages
from services.weights.versions.encoder import as_tensor, bits
from services.weights.versions.manifest import TensorPiece, VersionManifest, Weight
from services.weights.versions.merge import merged
from services.weights.versions.pieces import decode
from services.weights.versions.positions import InvalidVersion

NOTHING = (0, -1)

THREADS = min(4, os.cpu_count() or 1)
"""Threads that decode, apply and compare: numpy and zstandard let each other run."""
QUEUED = 2 * THREADS
"""Groups of pieces that may wait for them before the next part is taken."""
GROUP = 1 << 21
"""Elements of a group at least."""

Undo = list[tuple[np.ndarray, np.ndarray | slice, np.ndarray]]
"""Elements of a piece, where they changed, what was there."""


class WeightMirror:
    """Holds nothing until an anchor has been applied."""

    def __init__(self) -> None:
        self.held: tuple[int, int] = NOTHING
        """The trainer's fence and the version whose bits these are."""
        self._metas: list[TensorMeta] = []
        self._tensors: list[torch.Tensor] = []
        self._weights: list[Weight] = []
        self._allocating = threading.Lock()

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights under their Hugging Face names; adapters are merged into new tensors, others share the memory."""
        if self.held == NOTHING:
            raise RuntimeError("no version is held")
        return [
            (weight.name, merged([self._tensors[index] for index in weight.sources], weight.scale)) for weight in self._weights
        ]

    def adopt(self, held: tuple[int, int], metas: list[TensorMeta], tensors: list[torch.Tensor], weights: list[Weight]) -> None:
        """Hold `tensors`, which came whole and have been checked, as those of a version. They are contiguous, in host memory, and
        belong to the mirror until it forgets them.
        """
        self.held, self._metas, self._tensors, self._weights = held, metas, tensors, weights

    def apply(self, manifest: VersionManifest, parts: Iterable[tuple[int, memoryview]], last: bool = True) -> None:
        """Apply a version whose base is held, or an anchor. `parts`: index and bytes of every part, in any order, once each.
        `last`: whether to compare checksums; a version that others follow at once is compared as part of the last one.

        Raises `InvalidVersion`, `WeightChanged`, and whatever `parts` raises.
        """
        undo: Undo = []
        if manifest.base is None:
            self._empty(manifest)
        elif self.held != (manifest.fence, manifest.base) or self._metas != manifest.tensors:
            raise InvalidVersion(f"version {manifest.version} changes version {manifest.base}, which is not held")
        try:
            self._fill(manifest, parts, undo, last)
        except BaseException:
            if manifest.base is None:
                self.forget()
            else:
                _take_back(undo)
            raise
        self.held, self._weights = (manifest.fence, manifest.version), manifest.weights

    def _fill(self, manifest: VersionManifest, parts: Iterable[tuple[int, memoryview]], undo: Undo, last: bool) -> None:
        of_part: dict[int, list[TensorPiece]] = {}
        for piece in manifest.pieces:
            of_part.setdefault(piece.part if piece.blocks else -1, []).append(piece)
        awaited, running = set(range(len(manifest.parts))), deque[Future[None]]()
        with ThreadPoolExecutor(THREADS, "apply-weights") as threads:  # on any error, ends once nobody writes any more

            def put(index: int, data: memoryview) -> None:
                for pieces in _groups(of_part.pop(index, [])):
                    running.append(threads.submit(self._put, manifest, pieces, data, undo, last))

            for index, data in parts:
                if index not in awaited or len(data) != manifest.parts[index].nbytes:
                    raise InvalidVersion(f"a part of version {manifest.version} has {len(data)} bytes, or was not awaited")
                awaited.remove(index)
                while len(running) > QUEUED:
                    running.popleft().result()
                put(index, data)
            if awaited:
                raise InvalidVersion(f"version {manifest.version} lacks {len(awaited)} of its parts")
            put(-1, memoryview(b""))  # those that did not change
            for each in running:
                each.result()

    def _put(self, manifest: VersionManifest, pieces: list[TensorPiece], data: memoryview, undo: Undo, last: bool) -> None:
        held: list[np.ndarray] = []
        for piece in pieces:
            elements = bits(self._tensor(piece.tensor))[piece.start : piece.start + piece.count]
            change = decode(piece.encoding, piece.changed, _blocks(piece, data), elements)
            if manifest.base is not None and piece.blocks:
                undo.append((elements, change.where, change.old.copy() if isinstance(change.where, slice) else change.old))
            elements[change.where] = change.new
            held.append(elements)
        found = checksums(as_tensor(elements) for elements in held).tolist() if last else []
        for piece, sums in zip(pieces, found, strict=last):
            if tuple(sums) != piece.checksum:
                raise WeightChanged(manifest.tensors[piece.tensor].name)

    def _tensor(self, index: int) -> torch.Tensor:
        """Return a tensor's memory, allocated once the first bytes for it are there."""
        with self._allocating:
            if self._tensors[index].numel() == 0 and self._metas[index].nbytes:
                meta = self._metas[index]
                self._tensors[index] = huge_pages(meta.nbytes).view(getattr(torch, meta.dtype)).view(meta.shape)
            return self._tensors[index]

    def _empty(self, manifest: VersionManifest) -> None:
        """Make room for an anchor, in the memory of before if its tensors have the same shapes."""
        self.held = NOTHING
        if self._metas != manifest.tensors:
            self._metas = manifest.tensors
            self._tensors = [torch.empty(0, dtype=getattr(torch, meta.dtype)) for meta in manifest.tensors]
            for i, meta in enumerate(manifest.tensors):
                if not meta.nbytes:
                    self._tensors[i] = self._tensors[i].view(meta.shape)

    def forget(self) -> None:
        """Hold nothing."""
        self.held, self._metas, self._tensors, self._weights = NOTHING, [], [], []


def _groups(pieces: list[TensorPiece]) -> Iterator[list[TensorPiece]]:
    """Yield the pieces in groups for one thread each, at least one."""
    group, elements = list[TensorPiece](), 0
    for piece in pieces:
        group.append(piece)
        elements += piece.count
        if elements >= GROUP:
            yield group
            group, elements = [], 0
    if group:
        yield group


def _blocks(piece: TensorPiece, data: memoryview) -> list[tuple[memoryview, int, bool]]:
    found: list[tuple[memoryview, int, bool]] = []
    start = piece.offset
    for block in piece.blocks:
        found.append((data[start : start + block.stored], block.raw, block.compressed))
        start += block.stored
    return found


def _take_back(undo: Undo) -> None:
    for elements, where, before in reversed(undo):
        elements[where] = before
