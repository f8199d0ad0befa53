"""How weights travel from the trainer's rank 0: over a gloo group, through a folder, over an NCCL group.

Guarantees: a transport is opened, connected and used by rank 0 only; every wait has a limit; errors are those of `FAILURES`, and
after one the transport must be opened again. Weights arrive bucket by bucket, each whole only until the next is requested.
Receivers: services/weights/receivers/gloo.py and nccl.py.
"""

from __future__ import annotations

import socket
import threading
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
    BUCKET_BYTES,
    CONNECTIONS,
    NCCL_ID,
    Abort,
    Bucket,
    Deadline,
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

Gathered = Iterator[tuple[Bucket, list[torch.Tensor]]]
"""Buckets with their tensors, in the manifest's order, each whole until the next is requested."""

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
    def send(self, gathered: Gathered, manifest: WeightManifest, deadline: Deadline) -> None:
        """Send every bucket, and the checksums if the manifest is `verified`."""

    @abstractmethod
    def close(self) -> None:
        """Release the group, if any."""


class _Meeting(Transport):
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


class GlooTransport(_Meeting):
    """Broadcasts between host memories."""

    backend = "gloo"

    def __init__(self, config: RunConfig, fleeting: bool) -> None:
        super().__init__(config, fleeting)
        self._buckets = HostBuckets(CONNECTIONS + 1, fleeting)

    def connect(self, world_size: int) -> None:
        """Connect to each member, with one connection per bucket in flight."""
        self._group = make_group(self._store, 0, world_size, self.host, self._store.port, self.sync.join_deadline_s)

    def send(self, gathered: Gathered, manifest: WeightManifest, deadline: Deadline) -> None:
        """Prepare or checksum one bucket while `CONNECTIONS` buckets are in flight."""
        group, sums, under_way = self.group, list[torch.Tensor](), deque[Any]()
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

    def send(self, gathered: Gathered, manifest: WeightManifest, deadline: Deadline) -> None:
        """Prepare or checksum one bucket while another is written."""
        sums: list[torch.Tensor] = []
        writing: Future[None] | None = None
        self._outbox.begin()
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

    def close(self) -> None:
        """Remove the group's folder."""
        self._outbox.close()


class NcclTransport(_Meeting):
    """Broadcasts between GPUs, packed by vLLM."""

    backend = "nccl"

    def connect(self, world_size: int) -> None:
        """Connect in a thread, because NCCL itself waits forever."""
        self._group = _nccl_communicator(self._store, world_size, self.sync.join_deadline_s)

    def send(self, gathered: Gathered, manifest: WeightManifest, deadline: Deadline) -> None:
        """Send with vLLM's producer, which packs the weights into its own buckets; a broadcast past the deadline is aborted."""
        from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_NUM_BUFFERS, packed_nccl_broadcast_producer

        group, sums = self.group, list[torch.Tensor]()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for bucket, tensors in gathered:
                if manifest.verified:
                    sums.append(checksums(tensors))
                for meta, tensor in zip(bucket.tensors, tensors, strict=True):
                    yield meta.name, tensor.clone() if self.fleeting else tensor  # read after the next has been requested

        with Abort(deadline.left.total_seconds(), group.destroy) as abort:
            packed_nccl_broadcast_producer(
                iterator=weights(),
                group=group,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=BUCKET_BYTES,
                num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
            )
            torch.cuda.synchronize()
            if manifest.verified:
                group.broadcast(torch.cat(sums), src=0)
                torch.cuda.synchronize()
            if abort.passed:
                raise TimeoutError(f"the broadcast took longer than sync.transfer_deadline_s = {deadline.seconds:g}")

    def close(self) -> None:
        """Abort the communicator."""
        if self._group is not None:
            self._group.destroy()
        super().close()


def make_transport(config: RunConfig, fleeting: bool) -> Transport:
    """Return the transport of `sync.backend`; `auto` is NCCL if there is a GPU. `fleeting`: as in `Transport`."""
    backend = config.sync.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    return {"gloo": GlooTransport, "filesystem": FolderTransport, "nccl": NcclTransport}[backend](config, fleeting)


def _nccl_communicator(store: Any, world_size: int, timeout_s: float) -> Any:
    """Create rank 0 of an NCCL group whose members read the unique id from `store`; in a thread, because NCCL waits forever."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import unpinned_nccl_env

    device = torch.accelerator.current_device_index()
    unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
    store.set(NCCL_ID, unique_id)
    made: list[Any] = []

    def make() -> None:
        torch.accelerator.set_device_index(device)  # the current device is a property of the thread
        with unpinned_nccl_env():
            made.append(PyNcclCommunicator.from_unique_id_bytes(unique_id, 0, world_size, device))

    thread = threading.Thread(target=make, name="nccl-connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not made:
        raise TimeoutError(f"no NCCL group within sync.join_deadline_s = {timeout_s}")
    return made[0]
