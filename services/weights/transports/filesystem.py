"""Weights through a folder that all members see. Receiver: services/weights/receivers/gloo.py."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from services.config import RunConfig
from services.weights.checksums import checksums
from services.weights.collective import Deadline, Gathered, WeightManifest
from services.weights.host_memory import HostBuckets
from services.weights.shared_folder import Outbox
from services.weights.transports.base import Transport
from services.weights.versions.broadcast import EncodedDelta, Heading


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
