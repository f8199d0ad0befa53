"""A receiver's copy of the tensors of one version, in host memory, to which deltas are applied.

Guarantees: `load` and `apply` end with every tensor at the version's bits, each piece compared with its checksum, or raise: then
a delta is undone, and an anchor leaves nothing. Parts, positions and blocks of a delta are checked as they are decoded.
Cost: one copy of the tensors, and while a delta is applied the values that it replaces.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from services.weights.buckets import TensorMeta
from services.weights.checksums import WeightChanged, checksums
from services.weights.deadline import Deadline
from services.weights.merge import merged
from services.weights.versions.catalogue import InvalidVersion
from services.weights.versions.encoder import as_tensor, bits
from services.weights.versions.manifest import TensorPiece, VersionManifest, Weight
from services.weights.versions.objects import Target
from services.weights.versions.pieces import Change, decode

NOTHING = (0, -1)

THREADS = min(4, os.cpu_count() or 1)
"""Threads that decode, apply and compare: numpy and zstandard let each other run."""
GROUP = 1 << 21
"""Minimum number of elements in a group."""

Undo = list[tuple[np.ndarray, Change]]
"""Elements of a piece, and the change that undoes what was done to them."""


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


class WeightMirror:
    """Holds nothing until an anchor has been applied."""

    def __init__(self) -> None:
        self.held: tuple[int, int] = NOTHING
        """The trainer's fence and the version whose bits these are."""
        self.busy = threading.Lock()
        """Held while a thread brings the mirror to a version; the thread may outlive its callers."""
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

    def load(
        self,
        manifest: VersionManifest,
        read: Callable[[int, Sequence[Target]], Iterator[None]],
        pool: ThreadPoolExecutor,
        deadline: Deadline,
        following: Sequence[Callable[[], Delta]] = (),
        last: bool = True,
    ) -> None:
        """Hold an anchor, or nothing. `read` fills memory from a part, named by its index, one target after the other, on threads
        of `pool`. A late thread may still write after this has returned, but then no tensor uses that memory.

        `following`: return deltas that lead on from it and are cut into pieces like it. They are applied to what has arrived
        while the rest is being read. `last`: as in `apply`.
        Raises `InvalidVersion`, `WeightChanged`, `TimeoutError`, and whatever `read` raises.
        """
        if manifest.base is not None:
            raise InvalidVersion(f"version {manifest.version} is a delta")
        of_part: list[list[int]] = [[] for _ in manifest.parts]
        for place, piece in enumerate(manifest.pieces):
            if piece.count:
                of_part[piece.part].append(place)
        tasks: list[Future[None]] = []
        try:
            self._make_room(manifest)
            for part, places in enumerate(of_part):
                runs = {place: self._run(manifest.pieces[place]) for place in places}
                tasks.append(pool.submit(_load_part, manifest, part, runs, read, following, last))
            for task in tasks:
                task.result(deadline.left.total_seconds())
            final = following[-1]().manifest if following else manifest
            self.held, self._weights = (final.fence, final.version), final.weights
        finally:
            if self.held == NOTHING:
                for task in tasks:
                    task.cancel()
                self.forget()

    def apply(self, delta: Delta, last: bool = True) -> None:
        """Apply a delta whose base is held. `last`: whether to compare checksums; a version that others follow at once is
        compared as part of the last one.

        Raises `InvalidVersion` or `WeightChanged`.
        """
        manifest = delta.manifest
        if manifest.base is None or self.held != (manifest.fence, manifest.base) or self._metas != manifest.tensors:
            raise InvalidVersion(f"version {manifest.version} changes version {manifest.base}, which is not held")
        undo: Undo = []
        try:
            with ThreadPoolExecutor(THREADS, "apply-weights") as threads:  # on any error, ends once nobody writes
                places = groups(manifest.pieces, range(len(manifest.pieces)))
                for each in [threads.submit(self._put, delta, group, undo, last) for group in places]:
                    each.result()
            self.held, self._weights = (manifest.fence, manifest.version), manifest.weights
        finally:
            if self.held != (manifest.fence, manifest.version):
                for elements, change in reversed(undo):
                    change.put(elements)

    def _put(self, delta: Delta, places: list[int], undo: Undo, last: bool) -> None:
        runs = [self._run(delta.manifest.pieces[place]) for place in places]
        for place, elements in zip(places, runs, strict=True):
            change = delta.change(place)
            undo.append((elements, change.back(elements)))
            change.put(elements)
        if last:
            _compare(delta.manifest, places, runs)

    def _run(self, piece: TensorPiece) -> np.ndarray:
        """Return the elements of a piece, [count] unsigned, in their memory."""
        return bits(self._tensors[piece.tensor])[piece.start : piece.start + piece.count]

    def _make_room(self, manifest: VersionManifest) -> None:
        """Allocate memory for an anchor, or reuse the memory held if its tensors have the same shapes."""
        self.held = NOTHING
        if self._metas != manifest.tensors:
            self.forget()  # first, so that both are never held
            # Not in huge pages: on a virtual machine whose host has to find them first, that takes twice as long.
            self._tensors = [torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in manifest.tensors]
            self._metas = manifest.tensors

    def forget(self) -> None:
        """Hold nothing."""
        self.held, self._metas, self._tensors, self._weights = NOTHING, [], [], []


def _load_part(
    manifest: VersionManifest,
    part: int,
    runs: dict[int, np.ndarray],
    read: Callable[[int, Sequence[Target]], Iterator[None]],
    following: Sequence[Callable[[], Delta]],
    last: bool,
) -> None:
    reading = read(part, [(manifest.pieces[place].offset, run.data.cast("B")) for place, run in runs.items()])
    for group in groups(manifest.pieces, runs):
        for _ in group:
            next(reading)
        final = manifest
        for each in following:
            delta = each()
            for place in group:
                delta.change(place).put(runs[place])
            final = delta.manifest
        if last:
            _compare(final, group, [runs[place] for place in group])


def _compare(manifest: VersionManifest, places: list[int], runs: list[np.ndarray]) -> None:
    """Raise `WeightChanged` for the first piece whose elements have another checksum."""
    for place, sums in zip(places, checksums(as_tensor(run) for run in runs).tolist(), strict=True):
        piece = manifest.pieces[place]
        if tuple(sums) != piece.checksum:
            raise WeightChanged(manifest.tensors[piece.tensor].name)


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
