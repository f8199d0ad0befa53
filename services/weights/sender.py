"""The trainer's side of a weight transfer: rank 0 opens a group, every rank takes part in sending.

Guarantees: names are those of the Hugging Face model, with tied weights under each of their names; adapters are merged only into
what is sent; at most one bucket is gathered at a time, never the whole model; every wait has a limit; with `sync.verify`,
checksums follow, computed from the weights and not from buffers they are copied into. After a failure the group cannot be used
again: all ranks have gone through all gathers, so they stay in step, and rank 0 opens another group.
For the transports, see services/weights/transports.py. Buffers of the model are not sent, because training does not change them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from services.config import RunConfig
from services.weights.collective import BUCKET_BYTES, Deadline, let_go, plan_buckets
from services.weights.host_memory import as_they_lie, describe
from services.weights.transports import FAILURES, Gathered, make_transport

Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Builds a weight from its parts."""


class SendFailed(Exception):
    """The group could not be formed, or a transfer broke. Open another group under a new epoch."""


class Sender(Protocol):
    """What rounds need of a sender; see `WeightSender`."""

    @property
    def backend(self) -> str:
        """Return its name in `sync.backend`."""
        ...

    @property
    def ahead(self) -> bool:
        """Return whether everything is sent before members are notified."""
        ...

    @property
    def sweeps(self) -> bool:
        """Return whether there may be something to sweep."""
        ...

    @property
    def sent(self) -> dict[str, float]:
        """Return what the last `send` took: bytes, share of all bytes, share of the elements that changed, 1 for a delta."""
        ...

    def label(self, version: int, fence: int) -> None:
        """Say which version of which trainer the next `send` sends."""
        ...

    def open(self) -> tuple[str, int]:
        """Open a group. Raises `SendFailed`."""
        ...

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that have not arrived."""
        ...

    def connect(self, world_size: int) -> None:
        """Form the group. Raises `SendFailed`."""
        ...

    def send(self) -> None:
        """All ranks: send every weight once. Raises `SendFailed`, on rank 0 only."""
        ...

    def sweep(self, readers: Iterable[str]) -> None:
        """Delete what nobody needs, members that announced their reading included."""
        ...

    def close_group(self) -> None:
        """Drop the group, if any."""
        ...


class WeightSender:
    """Sends the weights of a model. Every rank creates one; `open`, `connect` and `close_group` are for rank 0.

    Calls block. A round is `open` → tell the members host and port → nobody `absent` → `connect` → `send` on all ranks, any
    number of times.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: Mapping[str, Sequence[torch.nn.Parameter]],
        merge: Merge,
        rank: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`parts` names the parameters that each weight is built from; the first has the weight's shape. `merge` builds the
        weight. A tied weight is listed under each of its names, because an engine that repacks its weights holds two copies of
        it.
        """
        self._sync, self._merge, self._parts = config.sync, merge, parts
        self._sender = rank == 0
        self._partitioned = any(hasattr(weight, "ds_id") for weights in parts.values() for weight in weights)
        first = {name: weight for name, (weight, *_) in self._parts.items()}
        order = list(first) if self._partitioned else as_they_lie(first)
        self.manifest = plan_buckets([describe(name, first[name]) for name in order], bucket_bytes, config.sync.verify)
        """Return the manifest of every transfer."""
        self._transport = make_transport(config, fleeting=self._partitioned)

    sweeps = False
    """Return whether there may be something to sweep."""

    @property
    def sent(self) -> dict[str, float]:
        """Return nothing: a group always gets all weights."""
        return {}

    def label(self, version: int, fence: int) -> None:
        """Rank 0: say which version of which trainer the next `send` sends. Members learn that from the round."""

    def sweep(self, readers: Iterable[str]) -> None:
        """Rank 0: delete what members that announced their reading do not need. Groups keep nothing."""

    @property
    def backend(self) -> str:
        """Return `gloo`, `nccl` or `filesystem`."""
        return self._transport.backend

    @property
    def ahead(self) -> bool:
        """Return whether everything is sent before members are notified; otherwise they take part while it is sent."""
        return self._transport.ahead

    def open(self) -> tuple[str, int]:
        """Rank 0: open a group. Returns host and port of the rendezvous of its members, or the name of a folder below the run's
        weights, and 0.

        Raises `SendFailed` if the folder cannot be created.
        """
        self.close_group()
        try:
            return self._transport.open(self.manifest)
        except OSError as error:
            raise SendFailed(f"cannot open a weight group, check sync.host and sync.folder: {error}") from error

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Rank 0: return those of `ranks` that have not arrived at the rendezvous. With a folder, members themselves report that
        they see it.
        """
        return self._transport.absent(ranks)

    def connect(self, world_size: int) -> None:
        """Rank 0: form the group of `world_size` ranks, including this one, once every member is connected.

        Raises `SendFailed` after `sync.join_deadline_s`.
        """
        try:
            self._transport.connect(world_size)
        except (RuntimeError, TimeoutError) as error:
            let_go(error)
            self.close_group()
            raise SendFailed(f"not all of {world_size - 1} receiving ranks joined: {error}") from error

    def send(self) -> None:
        """All ranks: send every weight once.

        Raises `SendFailed`, on rank 0 only, after `sync.transfer_deadline_s` or when a member breaks.
        """
        gathered = self._gathered()
        try:
            if self._sender:
                self._transport.send(gathered, self.manifest, Deadline(self._sync.transfer_deadline_s))
        except FAILURES as error:
            let_go(error)
            self.close_group()
            raise SendFailed(f"failed to send weights: {error}") from error
        finally:
            for _ in gathered:  # after a failure too: the other ranks continue gathering
                pass

    def close_group(self) -> None:
        """Rank 0: drop the group and its store, if any."""
        self._transport.close()

    def _gathered(self) -> Gathered:
        """Yield each bucket while its weights are whole on this rank. Collective under ZeRO-3: all ranks must iterate to the
        end.
        """
        for bucket in self.manifest.buckets:
            parts = [part for meta in bucket.tensors for part in self._parts[meta.name]]
            with self._whole(parts):
                yield bucket, [self._merge(self._parts[meta.name]) for meta in bucket.tensors]

    def _whole(self, weights: list[torch.nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        if not self._partitioned:
            return contextlib.nullcontext()
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        return GatheredParameters(list({id(weight): weight for weight in weights}.values()))
