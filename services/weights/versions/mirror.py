"""A receiver's copy of the tensors of one version, in host memory, to which deltas are applied.

Guarantees: `load` and `apply` end with every tensor at the version's bits, each piece compared with its checksum, or raise: then
a delta is undone, and an anchor leaves nothing. What is applied has been checked: sizes by the manifest, positions and blocks as
they are decoded. Bytes that come from outside may be anything.
Cost: one copy of the tensors, and while a delta is applied the values that it replaces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from services.weights.checksums import WeightChanged, checksums
from services.weights.collective import Deadline, TensorMeta, huge_pages
from services.weights.versions.encoder import as_tensor, bits
from services.weights.versions.manifest import TensorPiece, VersionManifest, Weight
from services.weights.versions.merge import merged
from services.weights.versions.objects import Target
from services.weights.versions.pieces import decode
from services.weights.versions.positions import InvalidVersion

NOTHING = (0, -1)

THREADS = min(4, os.cpu_count() or 1)
"""Threads that decode, apply and compare: numpy and zstandard let each other run."""
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

    def load(
        self,
        manifest: VersionManifest,
        read: Callable[[int, Sequence[Target]], None],
        pool: ThreadPoolExecutor,
        deadline: Deadline,
        last: bool = True,
    ) -> None:
        """Hold an anchor, or nothing. `read` fills memory from a part, named by its index, on threads of `pool`, of which one
        that is late may still do so afterwards: no tensor has that memory then. `last` as of `apply`.

        Raises `InvalidVersion`, `WeightChanged`, `TimeoutError`, and whatever `read` raises.
        """
        if manifest.base is not None:
            raise InvalidVersion(f"version {manifest.version} is a delta")
        of_part: list[list[TensorPiece]] = [[] for _ in manifest.parts]
        for piece in manifest.pieces:
            if piece.count:
                of_part[piece.part].append(piece)
        tasks: list[Future[None]] = []
        try:
            self._make_room(manifest)
            for part, pieces in enumerate(of_part):
                runs = [self._run(piece) for piece in pieces]
                tasks.append(pool.submit(_load_part, manifest, part, pieces, runs, read, last))
            for task in tasks:
                task.result(deadline.left.total_seconds())
        except BaseException:
            for task in tasks:
                task.cancel()
            self.forget()
            raise
        self.held, self._weights = (manifest.fence, manifest.version), manifest.weights

    def apply(self, manifest: VersionManifest, parts: Iterable[tuple[int, memoryview]], last: bool = True) -> None:
        """Apply a delta whose base is held. `parts`: index and bytes of every part, in any order, once each. `last`: whether to
        compare checksums; a version that others follow at once is compared as part of the last one.

        Raises `InvalidVersion`, `WeightChanged`, and whatever `parts` raises.
        """
        if manifest.base is None or self.held != (manifest.fence, manifest.base) or self._metas != manifest.tensors:
            raise InvalidVersion(f"version {manifest.version} changes version {manifest.base}, which is not held")
        undo: Undo = []
        try:
            self._fill(manifest, parts, undo, last)
        except BaseException:
            _take_back(undo)
            raise
        self.held, self._weights = (manifest.fence, manifest.version), manifest.weights

    def _fill(self, manifest: VersionManifest, parts: Iterable[tuple[int, memoryview]], undo: Undo, last: bool) -> None:
        of_part: dict[int, list[TensorPiece]] = {}
        for piece in manifest.pieces:
            of_part.setdefault(piece.part if piece.blocks else -1, []).append(piece)
        awaited, running = set(range(len(manifest.parts))), list[Future[None]]()
        with ThreadPoolExecutor(THREADS, "apply-weights") as threads:  # on any error, ends once nobody writes

            def put(index: int, data: memoryview) -> None:
                for pieces in _groups(of_part.pop(index, [])):
                    running.append(threads.submit(self._put, manifest, pieces, data, undo, last))

            for index, data in parts:
                if index not in awaited or len(data) != manifest.parts[index].nbytes:
                    raise InvalidVersion(f"a part of version {manifest.version} has {len(data)} bytes, or was not awaited")
                awaited.remove(index)
                put(index, data)
            if awaited:
                raise InvalidVersion(f"version {manifest.version} lacks {len(awaited)} of its parts")
            put(-1, memoryview(b""))  # those that did not change
            for each in running:
                each.result()

    def _put(self, manifest: VersionManifest, pieces: list[TensorPiece], data: memoryview, undo: Undo, last: bool) -> None:
        held = [self._run(piece) for piece in pieces]
        for piece, elements in zip(pieces, held, strict=True):
            change = decode(piece.encoding, piece.changed, _blocks(piece, data), elements)
            if piece.blocks:
                undo.append((elements, change.where, change.old.copy() if isinstance(change.where, slice) else change.old))
            elements[change.where] = change.new
        if last:
            _compare(manifest, pieces, held)

    def _run(self, piece: TensorPiece) -> np.ndarray:
        """Return the elements of a piece, [count] unsigned, in their memory."""
        return bits(self._tensors[piece.tensor])[piece.start : piece.start + piece.count]

    def _make_room(self, manifest: VersionManifest) -> None:
        """Allocate memory for an anchor, or reuse the memory held if its tensors have the same shapes."""
        self.held = NOTHING
        if self._metas != manifest.tensors:
            self.forget()  # first, so that both are never held
            self._tensors = [
                huge_pages(meta.nbytes).view(getattr(torch, meta.dtype)).view(meta.shape) for meta in manifest.tensors
            ]
            self._metas = manifest.tensors

    def forget(self) -> None:
        """Hold nothing."""
        self.held, self._metas, self._tensors, self._weights = NOTHING, [], [], []


def _load_part(
    manifest: VersionManifest,
    part: int,
    pieces: list[TensorPiece],
    runs: list[np.ndarray],
    read: Callable[[int, Sequence[Target]], None],
    last: bool,
) -> None:
    read(part, [(piece.offset, run.data.cast("B")) for piece, run in zip(pieces, runs, strict=True)])
    if last:
        _compare(manifest, pieces, runs)


def _compare(manifest: VersionManifest, pieces: list[TensorPiece], runs: list[np.ndarray]) -> None:
    """Raise `WeightChanged` for the first piece whose elements have another checksum."""
    for piece, sums in zip(pieces, checksums(as_tensor(run) for run in runs).tolist(), strict=True):
        if tuple(sums) != piece.checksum:
            raise WeightChanged(manifest.tensors[piece.tensor].name)


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
