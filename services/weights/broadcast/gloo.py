"""Weights over a gloo group, from one sender to many receivers, between host memories.

Guarantees: what is received is byte for byte what was sent; a group that failed once is never used again (open another one). The
sender is rank 0, and the manifest in its store says what it will send. The checksums of all tensors follow the last bucket, and a
receiver rejects a tensor whose checksum differs.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store

from services.weights.broadcast.host_memory import HostBuckets
from services.weights.broadcast.rendezvous import address_towards, arrive, join_store, own_address, read_manifest
from services.weights.broadcast.sender import BroadcastSender
from services.weights.buckets import Gathered, WeightManifest, huge_pages
from services.weights.checksums import check, checksums
from services.weights.deadline import Deadline
from services.weights.transport import Address, Loaded, Receiver

CONNECTIONS = 2
"""Connections between two ranks, each with a bucket in flight: a single one leaves the network idle while either side wakes
up.
"""


class GlooSender(BroadcastSender):
    """Broadcasts from host memory."""

    backend = "gloo"

    @cached_property
    def _buckets(self) -> HostBuckets:
        return HostBuckets(CONNECTIONS + 1, self.partitioned)

    def form(self, store: Any, world_size: int) -> ProcessGroupGloo:
        """Connect to each member, with one connection per bucket in flight."""
        return make_group(store, 0, world_size, self.host, store.port, self.sync.answer_s)

    def broadcast(self, group: ProcessGroupGloo, gathered: Gathered, deadline: Deadline) -> None:
        """Prepare or checksum one bucket while `CONNECTIONS` buckets are in flight."""
        sums, under_way = list[torch.Tensor](), deque[Any]()
        for i, (bucket, tensors) in enumerate(gathered):
            buffer = self._buckets.memory(i, bucket, tensors)
            if len(under_way) == CONNECTIONS:
                under_way.popleft().wait()
            under_way.append(begin_broadcast(group, buffer, deadline))
            sums.append(checksums(tensors))
        for work in under_way:
            work.wait()
        begin_broadcast(group, torch.cat(sums).cpu(), deadline).wait()


class GlooConnection(NamedTuple):
    """A joined group."""

    group: ProcessGroupGloo
    manifest: WeightManifest
    buffers: dict[int, torch.Tensor]
    """Memory to receive into, by bucket; it is reused for the life of the group."""


class GlooReceiver(Receiver):
    """Receives into host memory."""

    def connect(self, address: Address, rank: int) -> GlooConnection:
        """Join the gloo group and read its manifest."""
        store = join_store(address.host, address.port, address.timeout_s)
        group = make_group(store, rank, address.world_size, address.host, address.port, address.timeout_s)
        return GlooConnection(group, read_manifest(store), {})

    def take(self, connection: GlooConnection, version: int, deadline: Deadline) -> Loaded:
        """Receive every bucket."""
        return receive(*connection, deadline)


def make_group(store: Store, rank: int, size: int, host: str, port: int, timeout_s: float) -> ProcessGroupGloo:
    """Create a gloo group of `size` ranks that meet at `store`. Returns when all are connected; raises after `timeout_s`.

    For a receiver this also announces its arrival. `host` and `port` are the sender's; they select the network interface that
    leads to it.
    """
    if rank > 0:
        arrive(store, rank)
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    address = own_address(host) if rank == 0 else address_towards(host, port)
    options._devices = [
        ProcessGroupGloo.create_device(hostname=address) if address else ProcessGroupGloo.create_default_device()
        for _ in range(CONNECTIONS)
    ]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, size, options)


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


def receive(group: ProcessGroupGloo, manifest: WeightManifest, buffers: dict[int, torch.Tensor], deadline: Deadline) -> Loaded:
    """Receive one transfer into host memory: into `buffers`, by bucket number, which are allocated if missing. Fresh memory costs
    page faults, which take as long as the bytes.

    Raises `RuntimeError` or `TimeoutError`, after which the group cannot be used, and `WeightChanged`, after which it still can.
    """
    weights: Loaded = []
    held: list[torch.Tensor] = []
    under_way: deque[Any] = deque()

    def begin(i: int) -> None:
        if i < len(manifest.buckets):
            if i not in buffers:
                buffers[i] = huge_pages(manifest.buckets[i].nbytes)
            under_way.append(begin_broadcast(group, buffers[i], deadline))

    for i in range(CONNECTIONS):
        begin(i)
    for i, bucket in enumerate(manifest.buckets):
        under_way.popleft().wait()
        begin(i + CONNECTIONS)  # they arrive while this one is checked
        views = bucket.views(buffers[i])
        weights += views
        held.append(checksums(tensor for _, tensor in views))
    sent = torch.empty(len(weights), 2, dtype=torch.int64)
    begin_broadcast(group, sent, deadline).wait()
    check([name for name, _ in weights], held, sent)
    return manifest.with_aliases(weights)
