"""The two ends of every transport: a class that sends, for the trainer, and a class that receives, for an engine's worker.

A further transport is one of each, and one line of `TRANSPORTS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.config import RunConfig
from services.weights.buckets import BUCKET_BYTES
from services.weights.deadline import Deadline

TRANSPORTS = {
    "gloo": ("services.weights.broadcast.gloo:GlooSender", "services.weights.broadcast.gloo:GlooReceiver"),
    "nccl": ("services.weights.broadcast.nccl:NcclSender", "services.weights.broadcast.nccl:NcclReceiver"),
    "store": ("services.weights.versions.sender:StoreSender", "services.weights.versions.reader:StoreReceiver"),
}
"""Name in `sync.backend` -> import paths of the sender and of the receiver."""

OWNER = "GRPO_ENGINE_OWNER"
"""Environment variable: process id of the generator that owns the engine's processes."""

Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, by rank. Collective."""

Loaded = list[tuple[str, torch.Tensor]]
"""Weights, named as in the checkpoint."""


class SendFailed(Exception):
    """The group could not be formed, or a transfer broke. Open another group under a new epoch."""


@dataclass(frozen=True)
class TrainedWeights:
    """What a trainer sends: the weights that its parameters make up."""

    parameters: Mapping[str, torch.nn.Parameter]
    sources: Mapping[str, Sequence[str]]
    """Hugging Face name of each weight -> the parameters it is made of: one, or W, A and B of an adapter."""
    scale: float = 0.0
    """Factor of B A."""


class Sender:
    """The trainer's end. Every rank creates one; rank 0 alone calls all methods but `send`, which all ranks call together.

    Calls block. A round is `open` → tell the members the address → nobody is `absent` → `connect` → `send`, any number of times.
    """

    backend: str
    """Name in `sync.backend`."""
    ahead = False
    """Whether everything is sent before members are notified; otherwise they take part while it is sent."""

    def __init__(
        self,
        config: RunConfig,
        weights: TrainedWeights,
        rank: int,
        ranks: int,
        gather: Gather,
        bucket_bytes: int,
    ) -> None:
        raise NotImplementedError

    def open(self, fence: int) -> tuple[str, int]:
        """Open a group of the trainer with `fence`, and return its address: host and port, or a folder in the store and 0.

        Raises `SendFailed`.
        """
        raise NotImplementedError

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that have not arrived. Without a rendezvous there are none: members report what they see."""
        return []

    def connect(self, world_size: int) -> None:
        """Form the group of `world_size` ranks, including this one, once nobody is absent. Raises `SendFailed`."""

    def send(self, version: int, fence: int, damaged: bool = False) -> None:
        """Send every weight once, as `version` of the trainer with `fence`. Collective.

        `damaged`: members received the last version corrupted. Raises `SendFailed`, on rank 0 only, after which the group cannot
        be used again.
        """
        raise NotImplementedError

    def sweep(self, readers: Callable[[], Iterable[str]]) -> None:
        """Delete what nobody needs. `readers` returns what members announced that they read. A group keeps nothing."""

    def close(self) -> None:
        """Drop the group, if any."""

    @property
    def stats(self) -> dict[str, float]:
        """Return the cost of the last version, where it varies: bytes, share of all bytes, share of changed elements, whether it
        is a delta.
        """
        return {}


@dataclass
class Address:
    """Where the members of a group meet, for one engine."""

    host: str
    port: int
    first_rank: int  # rank of worker 0; the sender is rank 0
    world_size: int
    bucket_bytes: int
    timeout_s: float


class Receiver:
    """An engine worker's end. It outlives the groups that it joins, one after the other."""

    stages = True
    """Whether `take` receives into host memory beside sampling; otherwise `stream` writes into the model in a pause."""
    fetched_bytes: int | None = None
    """What the last transfer read from a store of versions; None without one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def connect(self, address: Address, rank: int) -> Any:
        """Connect to a group and return the connection; runs in a thread beside sampling. May raise any exception."""
        raise NotImplementedError

    def disconnect(self, connection: Any) -> None:
        """Release a connection. By default it is only dropped."""

    def take(self, connection: Any, version: int, deadline: Deadline) -> Loaded:
        """Receive all weights of `version` into host memory; runs in a thread beside sampling.

        Raises `RuntimeError`, `TimeoutError` or `WeightChanged`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not stage")

    def stream(self, connection: Any, deadline: Deadline, load: Callable[[Loaded], None]) -> None:
        """Receive all weights and pass them to `load` as they arrive. Raises like `take`."""
        raise NotImplementedError(f"{type(self).__name__} stages")


def backend_of(config: RunConfig, gpu: bool) -> str:
    """Return how weights are transferred: a key of `TRANSPORTS`."""
    return config.sync.backend if config.sync.backend != "auto" else ("nccl" if gpu else "gloo")


def make_sender(
    config: RunConfig, weights: TrainedWeights, rank: int, ranks: int, gather: Gather, bucket_bytes: int = BUCKET_BYTES
) -> Sender:
    """Return the sender of `sync.backend`; every rank makes one. Raises `ConfigError`."""
    sender: type[Sender] = _imported(TRANSPORTS[backend_of(config, torch.cuda.is_available())][0])
    return sender(config, weights, rank, ranks, gather, bucket_bytes)


def make_receiver(backend: str, device: torch.device) -> Receiver:
    """Return the receiver of a backend, for a worker on `device`."""
    receiver: type[Receiver] = _imported(TRANSPORTS[backend][1])
    return receiver(device)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
