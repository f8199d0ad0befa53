"""Weights from one sender to many receivers: a TCP store to meet at, a gloo group over it, tensors in buckets.

Guarantees: every wait has a limit; what is received is byte for byte what was sent; a group that failed once is never
used again (make another store and group). The sender is rank 0, and the manifest in the store says what it will send; of a
`verified` manifest the checksums of all tensors follow the last bucket, and a receiver takes nothing whose checksum differs.
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
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Self

import msgspec
import torch
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store, TCPStore  # typed, unlike torch.distributed

from services.weights.checksums import check, checksums

NCCL_ID = "nccl_id"
"""Key in the store of the NCCL unique id, raw bytes."""

CONNECTIONS = 2
"""From rank to rank, each with a bucket under way: one alone leaves the wire idle while either side is woken."""

_MANIFEST = "manifest"
_ARRIVED = "arrived/"
_ALIGNMENT = 64  # bytes; as torch allocates tensors, so that weights in memory laid out like a bucket are as fast as in their own


class Deadline:
    """A point in time that all waits of one operation share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> timedelta:
        """Time left, or `TimeoutError`."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the deadline of the weight transfer has passed")
        return timedelta(seconds=max(seconds, 0.001))


class Abort:
    """Ends what would wait for ever: `with Abort(seconds, end) as abort:` calls `end` in a thread after `seconds`, unless the
    block was left before; `end` has returned when the block is left, and `abort.passed` is set before it is called."""

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
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that travel in one broadcast, end to end from their offsets."""

    tensors: list[TensorMeta]
    offsets: list[int]  # bytes
    nbytes: int

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The tensors inside `buffer` (uint8, at least `nbytes` long), sharing its memory."""
        return [
            (meta.name, buffer[offset : offset + meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape))
            for meta, offset in zip(self.tensors, self.offsets, strict=True)
        ]


class WeightManifest(msgspec.Struct, frozen=True, array_like=True):
    """All that one transfer sends, in order."""

    buckets: list[Bucket]
    verified: bool = False  # whether [tensors, 2] int64 checksums follow the last bucket

    @property
    def nbytes(self) -> int:
        """Bytes of one transfer, checksums apart."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def tensors(self) -> list[TensorMeta]:
        """Every tensor, in the order sent."""
        return [meta for bucket in self.buckets for meta in bucket.tensors]


def plan_buckets(tensors: Iterable[TensorMeta], bucket_bytes: int, verified: bool = False) -> WeightManifest:
    """Pack tensors, in the order given, into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
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
    """[nbytes] uint8, zeros, in huge pages where the system has them: the first use of each page is a fault."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def open_store(host: str, timeout_s: float) -> TCPStore:
    """The sender's store, listening on a free port (`store.port`).

    It listens on `host` alone if that is an address of this machine, else on all addresses.
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
    """A receiver's connection to the sender's store."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def arrive(store: Store, rank: int) -> None:
    """Receiver: say that this rank has come, before it waits for the others."""
    store.set(f"{_ARRIVED}{rank}", "1")


def absent(store: Store, ranks: Iterable[int]) -> list[int]:
    """Sender: those of `ranks` that have not come."""
    return [rank for rank in ranks if not store.check([f"{_ARRIVED}{rank}"])]


def publish_manifest(store: Store, manifest: WeightManifest) -> None:
    """Sender: say what every transfer of this group will send."""
    store.set(_MANIFEST, msgspec.json.encode(manifest).decode())


def read_manifest(store: Store) -> WeightManifest:
    """Receiver: what the sender said, waiting for it up to the store's timeout."""
    return msgspec.json.decode(store.get(_MANIFEST), type=WeightManifest)


def make_group(store: Store, rank: int, size: int, host: str, port: int, timeout_s: float) -> ProcessGroupGloo:
    """A gloo group of `size` ranks that meet at `store`; returns when all are connected, raises after `timeout_s`. A receiver
    arrives with it.

    `host` and `port` are the sender's, to choose the network interface that leads to it.
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
    """Forget what the frames of a failed transfer hold. The other ranks hear of the failure when the group ends, and a group ends
    when nobody holds it: not one caught in the error's traceback, which may be part of a cycle."""
    traceback.clear_frames(error.__traceback__)


def begin_broadcast(group: ProcessGroupGloo, buffer: torch.Tensor, deadline: Deadline) -> Any:
    """Begin to send `buffer` from rank 0 to all, or to receive into it; the work is over after its `wait()`, which raises
    `RuntimeError`; the group is then spent. All ranks begin the same broadcasts in the same order. Raises `TimeoutError`."""
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = deadline.left
    return group.broadcast([buffer], options)  # pyright: ignore[reportAttributeAccessIssue]


def broadcast(group: ProcessGroupGloo, buffer: torch.Tensor, deadline: Deadline) -> None:
    """Send `buffer` from rank 0 to all, or receive into it. Raises `RuntimeError` or `TimeoutError`; the group is then spent."""
    begin_broadcast(group, buffer, deadline).wait()


def receive(
    group: ProcessGroupGloo, manifest: WeightManifest, deadline: Deadline, buffers: dict[int, torch.Tensor] | None = None
) -> list[tuple[str, torch.Tensor]]:
    """Receive one transfer into host memory. Raises as `broadcast`, after which the group is spent, and `Changed`, after which it
    stands.

    `buffers`, by number of the bucket, is memory to receive into, made where it is missing: a group that keeps it from one
    transfer to the next spares the page faults of fresh memory, which take as long as the bytes.
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
        begin(i + CONNECTIONS)  # they arrive while this one is looked at
        views = bucket.views(memory[i])
        weights += views
        if manifest.verified:
            held.append(checksums(tensor for _, tensor in views))
    if manifest.verified:
        sent = torch.empty(len(weights), 2, dtype=torch.int64)
        broadcast(group, sent, deadline)
        check([name for name, _ in weights], held, sent)
    return weights


def _own_address(host: str) -> str | None:
    """The IPv4 address of `host` if this machine has it; None for a name that leads elsewhere, e.g. to a Service."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return None
    return address


def _address_towards(host: str, port: int) -> str | None:
    """The address of this machine from which packets to `host` leave; None if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # a datagram socket sends nothing here
            return probe.getsockname()[0]
    except OSError:
        return None
