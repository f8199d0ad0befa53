"""How weights travel from the trainer's rank 0: over a gloo group or through a folder here, over NCCL in nccl_transport.py.

Guarantees: a transport is opened, connected and used by rank 0 only; every wait has a limit; errors are those of `FAILURES`, and
after one the transport must be opened again. Weights arrive bucket by bucket, each whole only until the next is requested.
Receivers: services/weights/receivers/gloo.py and nccl.py.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from safetensors import SafetensorError

from services.config import RunConfig
from services.weights.checksums import checksums
from services.weights.collective import (
    CONNECTIONS,
    Deadline,
    Gathered,
    WeightManifest,
    absent,
    begin_broadcast,
    broadcast,
    make_group,
    open_store,
    publish_manifest,
)
from services.weights.host_memory import HostBuckets
from services.weights.shared_folder import Outbox
from services.weights.sparse.patch import Patch
from services.weights.versions.broadcast import EncodedDelta, Heading

FAILURES = (RuntimeError, TimeoutError, OSError, SafetensorError)


class Transport(ABC):
    """One way to transfer weights. Call `open`, then `connect` once nobody is `absent`, then `send` any number of times, then
    `close`.
    """

    backend: str
    """Its name in `sync.backend`."""
    ahead = False
    """Whether everything is sent before members are notified; otherwise they take part while it is sent."""

    def __init__(self, config: RunConfig, fleeting: bool) -> None:
        """`fleeting` weights are gone when the next bucket is requested; others stay as long as they are referenced."""
        self.sync, self.fleeting = config.sync, fleeting

    @abstractmethod
    def open(self, manifest: WeightManifest) -> tuple[str, int]:
        """Return host and port of the members' rendezvous, or the name of a folder below the run's weights, and 0."""

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that have not arrived at the rendezvous."""
        return []

    @abstractmethod
    def connect(self, world_size: int) -> None:
        """Form the group of `world_size` ranks, including the sender."""

    @abstractmethod
    def send(self, gathered: Gathered, manifest: WeightManifest, deadline: Deadline, heading: Heading | None = None) -> None:
        """Send every bucket, then the checksums if the manifest is `verified`; first the heading, if it has `deltas`."""

    @abstractmethod
    def send_delta(self, delta: EncodedDelta, deadline: Deadline) -> None:
        """Send what changed; only if the manifest has `deltas`."""

    def send_patch(self, patch: Patch, parts: Iterator[torch.Tensor], heading: Heading, deadline: Deadline) -> None:
        """Send what changed to members that write it into their models. `parts`: the data, that of each rank as a whole."""
        raise NotImplementedError(f"{self.backend} sends no patches")

    def unpatchable(self) -> list[int]:
        """Return the ranks of the group that take no patches."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release the group, if any."""


class Meeting(Transport):
    """A transport whose members meet at a TCP store."""

    _store: Any = None
    _group: Any = None  # ProcessGroupGloo, or vLLM's PyNcclCommunicator

    def __init__(self, config: RunConfig, fleeting: bool) -> None:
        super().__init__(config, fleeting)
        self.host = config.sync.host or socket.gethostname()

    def open(self, manifest: WeightManifest) -> tuple[str, int]:
        """Listen on a free port."""
        self._store = open_store(self.host, self.sync.join_deadline_s)
        publish_manifest(self._store, manifest)
        return self.host, self._store.port

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Ask the store which ranks have not arrived."""
        return [] if self._store is None else absent(self._store, ranks)

    def close(self) -> None:
        """Drop the group, which ends with its last reference."""
        self._group = self._store = None

    @property
    def group(self) -> Any:
        """Return the connected group. Raises `RuntimeError` if there is none."""
        if self._group is None:
            raise RuntimeError("the group is not connected")
        return self._group


class GlooTransport(Meeting):
    """Broadcasts between host memories."""

    backend = "gloo"

    def __init__(self, config: RunConfig, fleeting: bool) -> None:
        super().__init__(config, fleeting)
        self._buckets = HostBuckets(CONNECTIONS + 1, fleeting)

    def connect(self, world_size: int) -> None:
        """Connect to each member, with one connection per bucket in flight."""
        self._group = make_group(self._store, 0, world_size, self.host, self._store.port, self.sync.join_deadline_s)

    def send(self, gathered: Gathered, manifest: WeightManifest, deadline: Deadline, heading: Heading | None = None) -> None:
        """Prepare or checksum one bucket while `CONNECTIONS` buckets are in flight."""
        group, sums, under_way = self.group, list[torch.Tensor](), deque[Any]()
        if heading is not None:
            broadcast(group, heading.encoded(), deadline)
        for i, (bucket, tensors) in enumerate(gathered):
            buffer = self._buckets.memory(i, bucket, tensors)
            if len(under_way) == CONNECTIONS:
                under_way.popleft().wait()
            under_way.append(begin_broadcast(group, buffer, deadline))
            if manifest.verified:
                sums.append(checksums(tensors))
        for work in under_way:
            work.wait()
        if manifest.verified:
            broadcast(group, torch.cat(sums).cpu(), deadline)

    def send_delta(self, delta: EncodedDelta, deadline: Deadline) -> None:
        """Broadcast heading and payload."""
        broadcast(self.group, delta.heading.encoded(), deadline)
        begin_broadcast(self.group, delta.payload, deadline).wait()


class FolderTransport(Transport):
    """Writes files to a folder that all members see."""

    backend = "filesystem"
    ahead = True

    def __init__(self, config: RunConfig, fleeting: bool) -> None:
        super().__init__(config, fleeting)
        self._outbox = Outbox(config.weights_folder)
        self._buckets = HostBuckets(2, fleeting)

    def open(self, manifest: WeightManifest) -> tuple[str, int]:
        """Create a folder for the group."""
        return self._outbox.open(manifest), 0

    def connect(self, world_size: int) -> None:
        """Do nothing: each member itself reports that it sees the folder."""

    def send(self, gathered: Gathered, manifest: WeightManifest, deadline: Deadline, heading: Heading | None = None) -> None:
        """Prepare or checksum one bucket while another is written."""
        sums: list[torch.Tensor] = []
        writing: Future[None] | None = None
        self._outbox.begin()
        if heading is not None:
            self._outbox.put_heading(heading)
        with ThreadPoolExecutor(1, "weights") as writer:
            for i, (bucket, tensors) in enumerate(gathered):
                buffer = self._buckets.memory(i, bucket, tensors)
                if writing is not None:
                    writing.result()
                deadline.left  # noqa: B018  raises when there is none
                writing = writer.submit(self._outbox.put, i, bucket, buffer)
                if manifest.verified:
                    sums.append(checksums(tensors))
            if writing is not None:
                writing.result()
        if manifest.verified:
            self._outbox.put_checksums(torch.cat(sums).cpu())

    def send_delta(self, delta: EncodedDelta, deadline: Deadline) -> None:
        """Write heading and payload."""
        self._outbox.begin()
        self._outbox.put_heading(delta.heading, delta.payload)

    def close(self) -> None:
        """Remove the group's folder."""
        self._outbox.close()


def make_transport(config: RunConfig, fleeting: bool) -> Transport:
    """Return the transport of `sync.backend`; `auto` is NCCL if there is a GPU. `fleeting`: as in `Transport`."""
    backend = config.sync.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        from services.weights.nccl_transport import NcclTransport

        return NcclTransport(config, fleeting)
    return {"gloo": GlooTransport, "filesystem": FolderTransport}[backend](config, fleeting)
