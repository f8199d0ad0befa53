"""The interface of transports, and the base class of those whose members meet at a TCP store."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError

from services.config import RunConfig
from services.weights.collective import (
    Deadline,
    Gathered,
    WeightManifest,
    absent,
    open_store,
    publish_manifest,
)
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
