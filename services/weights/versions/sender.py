"""The sender of `sync.backend = "store"`: every rank writes what changed in its share of the weights, rank 0 the rest.

Guarantees: a version that the catalogue names is in the store as a whole, and never changes; a rank that fails leaves no rank
waiting; a retry of a version writes the same bytes or an anchor; if the store lost what the next delta would need, or members
found it damaged, an anchor is written instead; what a reader has announced to read is not deleted. Rank 0 decides, and tells the
others in a collective.
Cost: a copy of the weights in host memory, shared by the ranks; anchors other than the first are written from it in a thread
while the next step is trained, and the next `send` waits for their end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from services.config import RunConfig
from services.weights.buckets import TensorMeta, describe
from services.weights.transport import Gather, Sender, SendFailed, TrainedWeights
from services.weights.versions import catalogue, manifest
from services.weights.versions.catalogue import CATALOGUE, MANIFEST, Catalogue, Entry, folder_of
from services.weights.versions.encoder import EncodedPart, ShardEncoder, partition_shards, rounded, whole_shards
from services.weights.versions.manifest import DataPart, TensorPiece, Weight
from services.weights.versions.objects import open_objects

log = structlog.get_logger()

PAYS = 0.8
"""A delta above this share of the weights is written as an anchor: it would save little, and needs its base."""

Described = list[tuple[DataPart, list[TensorPiece]]]
"""What one rank has written."""


@dataclass(frozen=True)
class Task:
    """What rank 0 wants written."""

    fence: int
    version: int
    base: int | None  # None: an anchor
    anchor_too: bool  # in the background, once the delta is written
    written: bool  # it was, in an earlier attempt


class StoreSender(Sender):
    """Writes versions of a model's weights to a store."""

    backend = "store"
    ahead = True

    def __init__(
        self,
        config: RunConfig,
        weights: TrainedWeights,
        rank: int,
        ranks: int,
        gather: Gather,
        bucket_bytes: int,
    ) -> None:
        """`bucket_bytes` is not used: pieces have a size of their own."""
        self._place, self._lead, self._gather = config.weights_place, rank == 0, gather
        parameters, sources = weights.parameters, weights.sources
        distinct = _distinct(parameters, sources)
        dtypes = _dtypes(parameters, sources)
        self._tensors = [
            TensorMeta(name, str(dtypes[name]).removeprefix("torch."), describe(name, parameter).shape)
            for name, parameter in distinct.items()
        ]
        places = {id(parameter): i for i, parameter in enumerate(distinct.values())}
        self._weights = [
            Weight(name, [places[id(parameters[part])] for part in parts], weights.scale if len(parts) > 1 else 0.0)
            for name, parts in sources.items()
        ]
        self._full_nbytes = sum(meta.nbytes for meta in self._tensors)
        partitioned = any(hasattr(parameter, "ds_id") for parameter in distinct.values())
        shards = partition_shards(distinct, rank) if partitioned else whole_shards(distinct, rank, ranks)
        read_as = [dtypes[meta.name] for meta in self._tensors]
        self._encoder = ShardEncoder([rounded(shard, read_as[shard.tensor]) for shard in shards], rank)
        self._objects = open_objects(self._place)
        self._delta: tuple[int, int, EncodedPart] | None = None  # base, version and bytes of the last one, for retries
        self._anchor: tuple[int, Future[Described]] | None = None  # version, and what this rank is writing of it
        self._writer = ThreadPoolExecutor(1, "anchor")
        self._catalogue = Catalogue(0)
        self._based: int | None = None  # rank 0: the version whose bits are the base on all ranks
        self._sweepable = False  # whether the store may hold what nobody needs
        self._last: Entry | None = None  # what the last `send` wrote

    @property
    def stats(self) -> dict[str, float]:
        """Return the cost of the last version that was written."""
        if self._last is None:
            return {}
        share = self._last.nbytes / max(1, self._last.full_nbytes)
        delta = float(self._last.base is not None)
        return {"bytes": float(self._last.nbytes), "share": share, "changed": self._last.changed, "delta": delta}

    def open(self, fence: int) -> tuple[str, int]:
        """Write the catalogue. Returns the trainer's folder below the place, and 0."""
        self._begin(fence)
        try:
            self._write_catalogue(self._catalogue)
        except OSError as error:
            raise SendFailed(f"cannot open the store of weights, check sync.folder: {error}") from error
        return str(self._catalogue.fence), 0

    def send(self, version: int, fence: int, damaged: bool = False) -> None:
        """Write the version, unless an earlier attempt did. A damaged store gets an anchor, and nothing more is built on it."""
        task: Task = self._gather(self._decide(version, fence, damaged) if self._lead else None)[0]
        if task.written:
            return
        finished = self._finish_anchor()
        problem, nbytes = self._encode(task)
        sizes: list[tuple[str, int, Any]] = self._gather((problem, nbytes, finished))
        if self._lead:
            self._record_anchor([anchor for _, _, anchor in sizes])
        whole = task.base is None or sum(size for _, size, _ in sizes) > PAYS * self._full_nbytes
        encoded = not any(said for said, _, _ in sizes)
        problem, described = self._write(task, whole) if encoded else (problem, [])
        told: list[tuple[str, Described]] = self._gather((problem, described))
        if self._lead:
            if encoded and not whole:
                self._based = task.version
            problems, parts = [said for said, _ in told if said], [part for _, parts in told for part in parts]
            self._record(task, whole, damaged, problems, parts)
        if task.anchor_too and not whole and not any(said for said, _ in told):
            self._anchor = (task.version, self._writer.submit(self._write_whole, task))

    def sweep(self, readers: Callable[[], Iterable[str]]) -> None:
        """Delete what is not needed, and what readers still need at a later call.

        What they announced is read after the catalogue has told them what stays.
        """
        if not self._sweepable:
            return
        writing = [folder_of(self._anchor[0], anchor=True)] if self._anchor else []
        announced = list(readers())
        try:
            names = list(self._objects.names())
            gone = catalogue.garbage(names, self._catalogue, writing, announced)
            self._objects.delete(gone)
        except OSError as error:
            log.warning("failed to sweep the store of weights", error=str(error))
            return
        self._sweepable = len(gone) < len(catalogue.garbage(names, self._catalogue, writing, ()))

    def _begin(self, fence: int) -> None:
        """Begin with nothing if another trainer wrote what is known."""
        if self._catalogue.fence != fence:
            self._catalogue, self._based, self._sweepable = Catalogue(fence), None, True

    def _decide(self, version: int, fence: int, damaged: bool) -> Task:
        self._begin(fence)
        self._look()
        if not damaged and any(entry.version == version for entry in self._catalogue.entries):
            return Task(fence, version, None, anchor_too=False, written=True)
        newest = self._catalogue.newest
        again = self._delta is not None and self._delta[:2] == (newest, version) and self._based == version
        base = newest if newest is not None and not damaged and (again or self._based == newest) else None
        self._based = None  # unless it is written
        return Task(fence, version, base, anchor_too=self._anchor is None and self._catalogue.anchor_due(), written=False)

    def _look(self) -> None:
        """Forget versions that the store has lost, so that nothing is built on them."""
        if self._catalogue.entries:
            try:
                self._catalogue = self._catalogue.existing(self._objects.names())
            except OSError as error:  # the write that follows says more
                log.warning("failed to list the store of weights", error=str(error))

    def _encode(self, task: Task) -> tuple[str, int]:
        """Encode this rank's delta. Returns why that failed, if it did, and its bytes."""
        if task.base is None:
            return "", 0
        try:
            if self._delta is None or self._delta[:2] != (task.base, task.version):
                self._delta = None
                self._delta = (task.base, task.version, self._encoder.encode())
        except (RuntimeError, MemoryError) as error:
            return str(error), 0
        return "", self._delta[2].nbytes

    def _write(self, task: Task, whole: bool) -> tuple[str, Described]:
        """Write this rank's parts. Returns why that failed, if it did, and what was written."""
        try:
            if whole:
                self._delta = None
                self._encoder.load()
                return "", self._write_whole(task)
            assert self._delta is not None
            return "", [self._put(task, self._delta[2], anchor=False)]
        except (OSError, RuntimeError, MemoryError) as error:
            return str(error), []

    def _write_whole(self, task: Task) -> Described:
        return [self._put(task, part, anchor=True) for part in self._encoder.whole()]

    def _put(self, task: Task, part: EncodedPart, anchor: bool) -> tuple[DataPart, list[TensorPiece]]:
        self._objects.put(f"{task.fence}/{folder_of(task.version, anchor)}/{part.name}", part.buffers)
        return DataPart(part.name, part.nbytes), part.pieces

    def _finish_anchor(self) -> tuple[int, Described] | None:
        """Wait for the anchor in the background. Returns its version and this rank's parts, or None if there is none."""
        if self._anchor is None:
            return None
        (version, writing), self._anchor = self._anchor, None
        self._sweepable = True  # what the anchor makes superfluous, or what is left of it
        try:
            return version, writing.result()
        except (OSError, RuntimeError, MemoryError) as error:
            log.warning("failed to write an anchor of the weights; a later version gets one", version=version, error=str(error))
            return None

    def _record_anchor(self, finished: list[tuple[int, Described] | None]) -> None:
        """Rank 0: name the anchor that all ranks have written in the background, and forget what it makes superfluous."""
        done = [anchor for anchor in finished if anchor is not None]
        if not done or len(done) < len(finished):
            return
        try:
            entry = self._describe(done[0][0], None, [part for _, parts in done for part in parts])
            self._write_catalogue(self._catalogue.with_entry(entry).trimmed())
        except OSError as error:
            log.warning("failed to record an anchor of the weights; a later version gets one", error=str(error))

    def _record(self, task: Task, whole: bool, damaged: bool, problems: list[str], parts: Described) -> None:
        """Rank 0: write the manifest, then the catalogue. Raises `SendFailed`."""
        self._sweepable |= whole or bool(problems)
        if problems:
            raise SendFailed(f"failed to write version {task.version}: {'; '.join(problems)}")
        self._based = task.version
        sound = Catalogue(task.fence) if damaged else self._catalogue
        try:
            entry = self._describe(task.version, None if whole else task.base, parts)
            self._write_catalogue(sound.with_entry(entry).trimmed())
        except OSError as error:
            self._sweepable = True
            raise SendFailed(f"failed to write version {task.version}: {error}") from error
        self._last = entry

    def _describe(self, version: int, base: int | None, parts: Described) -> Entry:
        made = manifest.assemble(version, self._catalogue.fence, base, self._tensors, self._weights, parts)
        elements = sum(piece.count for piece in made.pieces)
        names = [part.name for part in made.parts]
        entry = Entry(version, base, made.nbytes, self._full_nbytes, made.changed / max(1, elements), names)
        self._objects.put(f"{made.fence}/{entry.folder}/{MANIFEST}", [manifest.encode(made)])
        return entry

    def _write_catalogue(self, changed: Catalogue) -> None:
        self._objects.put(f"{changed.fence}/{CATALOGUE}", [catalogue.encode(changed)])
        self._catalogue = changed


def _dtypes(parameters: Mapping[str, torch.nn.Parameter], sources: Mapping[str, Sequence[str]]) -> dict[str, torch.dtype]:
    """Return the dtype in which each parameter travels: adapters, which are trained in float32, in that of what they adapt."""
    found = {name: parameter.dtype for name, parameter in parameters.items()}
    for weight, *adapter in sources.values():
        found |= dict.fromkeys(adapter, parameters[weight].dtype)
    return found


def _distinct(
    parameters: Mapping[str, torch.nn.Parameter], sources: Mapping[str, Sequence[str]]
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that weights are made of, each under one of its names: tied ones are sent once."""
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for names in sources.values():
        for name in names:
            found.setdefault(id(parameters[name]), (name, parameters[name]))
    return dict(found.values())
