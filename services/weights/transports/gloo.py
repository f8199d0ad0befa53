"""Weights over a gloo group. Receiver: services/weights/receivers/gloo.py."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from services.config import RunConfig
from services.weights.checksums import checksums
from services.weights.collective import CONNECTIONS, Deadline, Gathered, WeightManifest, begin_broadcast, broadcast, make_group
from services.weights.host_memory import HostBuckets
from services.weights.transports.base import Meeting
from services.weights.versions.broadcast import EncodedDelta, Heading


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
