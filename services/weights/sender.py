"""The trainer's side of a weight transfer: rank 0 opens a group, every rank takes part in sending.

Guarantees: names are those of the Hugging Face model, tied weights included under each of their names; adapters are merged
into what is sent and into nothing else; at most one bucket is gathered at a time, never the whole model; every wait has a
limit; with `sync.verify` checksums follow, made of the weights and not of buffers they are copied into. After a failure the group
is spent: all ranks have gone through all gathers, so the ranks stay in step, and rank 0 opens another group.
How they travel: services/weights/transports.py. Buffers of the model are not sent; training does not change them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from services.config import RunConfig
from services.weights.collective import Deadline, let_go, plan_buckets
from services.weights.host_memory import as_they_lie, describe
from services.weights.transports import FAILURES, Gathered, make_transport

Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Makes a weight of its parts."""


class SendFailed(Exception):
    """The group could not be made, or a transfer broke; the group is spent. Open another one under a new epoch."""


class WeightSender:
    """Sends the weights of a model. Every rank makes one; `open`, `connect` and `close_group` are for rank 0.

    Calls block. A round is `open` → tell the members host and port → nobody `absent` → `connect` → `send` on all ranks, any
    number of times.
    """

    def __init__(self, config: RunConfig, parts: Mapping[str, Sequence[torch.nn.Parameter]], merge: Merge, rank: int) -> None:
        """`parts` names the parameters that each weight is made of, the first of them with the weight's shape; `merge` makes the
        weight of them. A tied weight is listed under each name: an engine that repacks its weights holds two copies of it."""
        self._sync, self._merge, self._parts = config.sync, merge, parts
        self._sender = rank == 0
        self._partitioned = any(hasattr(weight, "ds_id") for weights in parts.values() for weight in weights)
        first = {name: weight for name, (weight, *_) in self._parts.items()}
        order = list(first) if self._partitioned else as_they_lie(first)
        self.manifest = plan_buckets(
            [describe(name, first[name]) for name in order], config.sync.bucket_mib << 20, config.sync.verify
        )
        """What every transfer sends."""
        self._transport = make_transport(config, fleeting=self._partitioned)

    @property
    def backend(self) -> str:
        """`gloo`, `nccl` or `filesystem`."""
        return self._transport.backend

    @property
    def ahead(self) -> bool:
        """Whether everything is sent before members are told of it; otherwise they take part while it is sent."""
        return self._transport.ahead

    def open(self) -> tuple[str, int]:
        """Rank 0: begin a group. Returns the host and port where its members are to meet, or the name of a folder below the
        run's weights, and 0. Raises `SendFailed` where the folder cannot be made."""
        self.close_group()
        try:
            return self._transport.open(self.manifest)
        except OSError as error:
            raise SendFailed(f"no group can be opened, see sync.host and sync.folder: {error}") from error

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Rank 0: those of `ranks` that have not come to the meeting place yet. Of a folder members say that they see it."""
        return self._transport.absent(ranks)

    def connect(self, world_size: int) -> None:
        """Rank 0: make the group of `world_size` ranks, this one included, once every member is connected. Raises `SendFailed`
        after `sync.join_deadline_s`."""
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
            raise SendFailed(f"weights could not be sent: {error}") from error
        finally:
            for _ in gathered:  # after a failure too: the other ranks go on gathering
                pass

    def close_group(self) -> None:
        """Rank 0: drop the group and its store, if any."""
        self._transport.close()

    def _gathered(self) -> Gathered:
        """Each bucket, while its weights are whole on this rank. Under ZeRO-3 a collective: all ranks iterate to the end."""
        for bucket in self.manifest.buckets:
            parts = [part for meta in bucket.tensors for part in self._parts[meta.name]]
            with self._whole(parts):
                yield bucket, [self._merge(self._parts[meta.name]) for meta in bucket.tensors]

    def _whole(self, weights: list[torch.nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        if not self._partitioned:
            return contextlib.nullcontext()
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        return GatheredParameters(list({id(weight): weight for weight in weights}.values()))
