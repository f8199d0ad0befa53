"""The trainer's side of `sync.backend = "store"`: every rank writes what changed in its share of the weights, rank 0 the rest.

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
from services.weights.collective import TensorMeta
from services.weights.host_memory import describe
from services.weights.sender import SendFailed
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
Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, by rank. Collective."""


@dataclass(frozen=True)
class Task:
    """What rank 0 wants written."""

    fence: int
    version: int
    base: int | None  # None: an anchor
    anchor_too: bool  # in the background, once the delta is written
    written: bool  # it was, in an earlier attempt


class StoreWeightSender:
    """Writes versions of a model's weights to a store. Every rank creates one. Its methods are those of `WeightSender`."""

    backend = "store"
    ahead = True

    def __init__(
        self,
        config: RunConfig,
        parameters: Mapping[str, torch.nn.Parameter],
        sources: Mapping[str, Sequence[str]],
        rank: int,
        ranks: int = 1,
        gather: Gather = lambda value: [value],
    ) -> None:
        """`parameters` are those of the model; `sources` names those that each weight is made of: itself, or W, A and B."""
        self._place, self._lead, self._gather = config.weights_place, rank == 0, gather
        distinct = _distinct(parameters, sources)
        dtypes = _dtypes(parameters, sources)
        self._tensors = [
            TensorMeta(name, str(dtypes[name]).removeprefix("torch."), describe(name, parameter).shape)
            for name, parameter in distinct.items()
        ]
        places = {id(parameter): i for i, parameter in enumerate(distinct.values())}
        self._weights = [
            Weight(name, [places[id(parameters[part])] for part in parts], config.lora.scale if len(parts) > 1 else 0.0)
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
        self._label = (0, 0)
        self._damaged = False  # members found that the store holds other bytes than were written
        self.sweeps = False
        """Return whether there may be something to sweep."""
        self._last: Entry | None = None  # what the last `send` wrote

    @property
    def sent(self) -> dict[str, float]:
        """Return what the last `send` took: bytes, share of all bytes, share of the elements that changed, 1 for a delta."""
        if self._last is None:
            return {}
        share = self._last.nbytes / max(1, self._last.full_nbytes)
        delta = float(self._last.base is not None)
        return {"bytes": float(self._last.nbytes), "share": share, "changed": self._last.changed, "delta": delta}

    def label(self, version: int, fence: int) -> None:
        """Rank 0: say which version of which trainer the next `send` sends."""
        self._label = (version, fence)
        if self._catalogue.fence != fence:
            self._catalogue, self._based, self.sweeps = Catalogue(fence), None, True

    def members_hold(self, version: int | None) -> None:
        """Do nothing: members find out themselves what they lack."""

    def took(self, seconds: float) -> None:
        """Do nothing: the size decides."""

    def arrived_damaged(self) -> None:
        """Rank 0: take that members could not use what the store holds; nothing more is built on it."""
        self._damaged = True

    def open(self) -> tuple[str, int]:
        """Rank 0: write the catalogue. Returns the trainer's folder below the place, and 0.

        Raises `SendFailed` if the store cannot be reached.
        """
        try:
            self._write_catalogue(self._catalogue)
        except OSError as error:
            raise SendFailed(f"cannot open the store of weights, check sync.folder: {error}") from error
        return str(self._catalogue.fence), 0

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Return none: members themselves report that they can read the store."""
        return []

    def connect(self, world_size: int) -> None:
        """Do nothing: nobody connects to the trainer."""

    def close_group(self) -> None:
        """Do nothing: what is in the store stays."""

    def send(self) -> None:
        """All ranks: write the labelled version, unless an earlier attempt did. Collective.

        Raises `SendFailed`, on rank 0 only.
        """
        task: Task = self._gather(self._decide() if self._lead else None)[0]
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
            self._record(task, whole, [said for said, _ in told if said], [part for _, parts in told for part in parts])
        if task.anchor_too and not whole and not any(said for said, _ in told):
            self._anchor = (task.version, self._writer.submit(self._write_whole, task))

    def sweep(self, readers: Iterable[str]) -> None:
        """Rank 0: delete what is not needed, and what readers still need at a later call. `readers`: what the fleet's members
        announced, read after the last `send`.
        """
        writing = [folder_of(self._anchor[0], anchor=True)] if self._anchor else []
        try:
            names = list(self._objects.names())
            gone = catalogue.garbage(names, self._catalogue, writing, readers)
            self._objects.delete(gone)
        except OSError as error:
            log.warning("failed to sweep the store of weights", error=str(error))
            return
        self.sweeps = len(gone) < len(catalogue.garbage(names, self._catalogue, writing, ()))

    def _decide(self) -> Task:
        version, fence = self._label
        self._look()
        if not self._damaged and any(entry.version == version for entry in self._catalogue.entries):
            return Task(fence, version, None, anchor_too=False, written=True)
        newest = self._catalogue.newest
        again = self._delta is not None and self._delta[:2] == (newest, version) and self._based == version
        base = newest if newest is not None and not self._damaged and (again or self._based == newest) else None
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
        self.sweeps = True  # what the anchor makes superfluous, or what is left of it
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

    def _record(self, task: Task, whole: bool, problems: list[str], parts: Described) -> None:
        """Rank 0: write the manifest, then the catalogue. Raises `SendFailed`."""
        self.sweeps |= whole or bool(problems)
        if problems:
            raise SendFailed(f"failed to write version {task.version}: {'; '.join(problems)}")
        self._based = task.version
        sound = Catalogue(task.fence) if self._damaged else self._catalogue
        try:
            entry = self._describe(task.version, None if whole else task.base, parts)
            self._write_catalogue(sound.with_entry(entry).trimmed())
        except OSError as error:
            self.sweeps = True
            raise SendFailed(f"failed to write version {task.version}: {error}") from error
        self._last, self._damaged = entry, False

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
