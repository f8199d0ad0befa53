"""Weights from one sender to many receivers: a TCP store as rendezvous, a gloo group over it, tensors in buckets.

Guarantees: every wait has a limit; what is received is byte for byte what was sent; a group that failed once is never used again
(create another store and group). The sender is rank 0, and the manifest in the store says what it will send. With a `verified`
manifest the checksums of all tensors follow the last bucket, and a receiver rejects a tensor whose checksum differs.
Imports torch; of `runtime` only this module and `checksums` do.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Self

import msgspec
import torch
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store, TCPStore  # typed, unlike torch.distributed

from services.weights.checksums import check, checksums

NCCL_ID = "nccl_id"
"""Key in the store for the NCCL unique id, raw bytes."""

CONNECTIONS = 2
"""Connections between two ranks, each with a bucket in flight: a single one leaves the network idle while either side wakes
up.
"""

BUCKET_BYTES = 32 << 20
"""Size of the buckets in which weights are gathered and broadcast, several at a time. Larger ones hold more memory and start
later; in smaller ones, the fixed cost of a broadcast shows.
"""

_MANIFEST = "manifest"
_ARRIVED = "arrived/"
_ALIGNMENT = 64  # bytes; torch's own alignment, so that weights laid out like a bucket are as fast as in their own memory


class Deadline:
    """A point in time that all waits of one operation share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Return whether no time is left."""
        return time.monotonic() >= self._end

    @property
    def left(self) -> timedelta:
        """Return the time left. Raises `TimeoutError` if none is."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the deadline of the weight transfer has passed")
        return timedelta(seconds=max(seconds, 0.001))


class Abort:
    """Interrupts calls that would wait forever: `with Abort(seconds, end) as abort:` calls `end` in a thread after `seconds`,
    unless the block has ended.

    The block is left only after `end` has returned; `abort.passed` is set before `end` is called.
    """

    def __init__(self, seconds: float, end: Callable[[], object]) -> None:
        self.passed = False
        self._end = end
        self._timer = threading.Timer(seconds, self._expire)

    def _expire(self) -> None:
        self.passed = True
        self._end()

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a manifest."""

    name: str  # Hugging Face parameter name
    dtype: str  # attribute of torch, e.g. bfloat16
    shape: list[int]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that are sent in one broadcast, stored contiguously at their offsets."""

    tensors: list[TensorMeta]
    offsets: list[int]  # bytes
    nbytes: int

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors inside `buffer` (uint8, at least `nbytes` long), sharing its memory."""
        return [
            (meta.name, buffer[offset : offset + meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape))
            for meta, offset in zip(self.tensors, self.offsets, strict=True)
        ]


Gathered = Iterator[tuple[Bucket, list[torch.Tensor]]]
"""Buckets with their tensors, in the manifest's order, each whole until the next is requested."""


class WeightManifest(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one transfer sends, in order."""

    buckets: list[Bucket]
    verified: bool = False  # whether [tensors, 2] int64 checksums follow the last bucket
    aliases: dict[str, str] = {}  # further names of tied weights, which travel once -> the name they travel under
    deltas: bool = False  # whether a heading precedes each transfer, which may be a delta (versions/broadcast.py)
    sparse: bool = False  # whether deltas are patches for the tensors that members sample with (sparse/patch.py)

    @property
    def nbytes(self) -> int:
        """Return the bytes of one transfer without checksums."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def tensors(self) -> list[TensorMeta]:
        """Return every tensor, in the order sent."""
        return [meta for bucket in self.buckets for meta in bucket.tensors]

    def with_aliases(self, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Return `weights`, with tied ones under each of their names; these share memory."""
        held = dict(weights)
        return weights + [(name, held[source]) for name, source in self.aliases.items() if source in held]


def plan_buckets(tensors: Iterable[TensorMeta], bucket_bytes: int, verified: bool = False) -> WeightManifest:
    """Pack tensors, in the order given, into buckets of at most `bucket_bytes`; a larger tensor gets its own bucket."""
    buckets: list[Bucket] = []
    group: list[TensorMeta] = []
    offsets: list[int] = []
    end = 0
    for meta in tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if group and start + meta.nbytes > bucket_bytes:
            buckets.append(Bucket(group, offsets, end))
            group, offsets, start = [], [], 0
        group.append(meta)
        offsets.append(start)
        end = start + meta.nbytes
    if group:
        buckets.append(Bucket(group, offsets, end))
    return WeightManifest(buckets, verified)


def huge_pages(nbytes: int) -> torch.Tensor:
    """Return [nbytes] uint8 zeros, in huge pages if the system has them: the first use of each page costs a page fault."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the system has no huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Open the sender's store, which listens on a free port (`store.port`).

    It listens only on `host` if that is an address of this machine, otherwise on all addresses.
    """
    with socket.socket() as listener:
        address = _own_address(host)
        listener.bind((address or "0.0.0.0", 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return TCPStore(
            address or "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect a receiver to the sender's store."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def arrive(store: Store, rank: int) -> None:
    """Receiver: announce this rank before it waits for the others."""
    store.set(f"{_ARRIVED}{rank}", "1")


def absent(store: Store, ranks: Iterable[int]) -> list[int]:
    """Sender: return those of `ranks` that have not arrived."""
    return [rank for rank in ranks if not store.check([f"{_ARRIVED}{rank}"])]


def publish_manifest(store: Store, manifest: WeightManifest) -> None:
    """Sender: publish what every transfer of this group will send."""
    store.set(_MANIFEST, msgspec.json.encode(manifest).decode())


def read_manifest(store: Store) -> WeightManifest:
    """Receiver: read the sender's manifest, waiting for it up to the store's timeout."""
    return msgspec.json.decode(store.get(_MANIFEST), type=WeightManifest)


def make_group(store: Store, rank: int, size: int, host: str, port: int, timeout_s: float) -> ProcessGroupGloo:
    """Create a gloo group of `size` ranks that meet at `store`. Returns when all are connected; raises after `timeout_s`.

    For a receiver this also announces its arrival. `host` and `port` are the sender's; they select the network interface that
    leads to it.
    """
    if rank > 0:
        arrive(store, rank)
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    address = _own_address(host) if rank == 0 else _address_towards(host, port)
    options._devices = [
        ProcessGroupGloo.create_device(hostname=address) if address else ProcessGroupGloo.create_default_device()
        for _ in range(CONNECTIONS)
    ]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, size, options)


def let_go(error: BaseException) -> None:
    """Release what the stack frames of a failed transfer hold.

    The other ranks learn of the failure when the group ends, and a group ends when its last reference is dropped. The error's
    traceback, which may be part of a cycle, must not keep one.
    """
    traceback.clear_frames(error.__traceback__)


def begin_broadcast(group: ProcessGroupGloo, buffer: torch.Tensor, deadline: Deadline) -> Any:
    """Start to send `buffer` from rank 0 to all, or to receive into it. Returns work that is complete after its `wait()`.

    `wait()` raises `RuntimeError`, after which the group cannot be used. All ranks start the same broadcasts in the same order.
    Raises `TimeoutError`.
    """
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = deadline.left
    return group.broadcast([buffer], options)  # pyright: ignore[reportAttributeAccessIssue]


def broadcast(group: ProcessGroupGloo, buffer: torch.Tensor, deadline: Deadline) -> None:
    """Send `buffer` from rank 0 to all, or receive into it.

    Raises `RuntimeError` or `TimeoutError`, after which the group cannot be used.
    """
    begin_broadcast(group, buffer, deadline).wait()


def receive(
    group: ProcessGroupGloo, manifest: WeightManifest, deadline: Deadline, buffers: dict[int, torch.Tensor] | None = None
) -> list[tuple[str, torch.Tensor]]:
    """Receive one transfer into host memory.

    Raises like `broadcast`, after which the group cannot be used, and `WeightChanged`, after which it still can.

    `buffers`, by bucket number, is memory to receive into, allocated if missing. A group that keeps it between transfers avoids
    the page faults of fresh memory, which take as long as the bytes.
    """
    memory = {} if buffers is None else buffers
    weights: list[tuple[str, torch.Tensor]] = []
    held: list[torch.Tensor] = []
    under_way: deque[Any] = deque()

    def begin(i: int) -> None:
        if i < len(manifest.buckets):
            if i not in memory:
                memory[i] = huge_pages(manifest.buckets[i].nbytes)
            under_way.append(begin_broadcast(group, memory[i], deadline))

    for i in range(CONNECTIONS):
        begin(i)
    for i, bucket in enumerate(manifest.buckets):
        under_way.popleft().wait()
        begin(i + CONNECTIONS)  # they arrive while this one is checked
        views = bucket.views(memory[i])
        weights += views
        if manifest.verified:
            held.append(checksums(tensor for _, tensor in views))
    if manifest.verified:
        sent = torch.empty(len(weights), 2, dtype=torch.int64)
        broadcast(group, sent, deadline)
        check([name for name, _ in weights], held, sent)
    return manifest.with_aliases(weights)


def _own_address(host: str) -> str | None:
    """Return the IPv4 address of `host` if it belongs to this machine; None for a name that leads elsewhere, e.g. to a
    Service.
    """
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return None
    return address


def _address_towards(host: str, port: int) -> str | None:
    """Return the address of this machine from which packets to `host` leave, or None if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # a datagram socket sends nothing here
            return probe.getsockname()[0]
    except OSError:
        return None
