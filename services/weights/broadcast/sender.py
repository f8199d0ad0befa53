"""The trainer's side of a broadcast: rank 0 sends every weight to a group, and every rank takes part in gathering.

Guarantees: names are those of the Hugging Face model, with tied weights under each of their names; adapters are merged only into
what is sent; at most one bucket is gathered at a time, never the whole model; every wait has a limit; checksums follow the
weights, computed from the weights and not from buffers they are copied into. After a failure the group cannot be used again: all
ranks have gone through all gathers, so they stay in step, and rank 0 opens another group.
Buffers of the model are not sent, because training does not change them.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import torch

from services.config import RunConfig
from services.weights.broadcast import rendezvous
from services.weights.broadcast.host_memory import as_they_lie
from services.weights.buckets import Bucket, Gathered, describe, plan_buckets
from services.weights.deadline import Deadline, let_go
from services.weights.merge import merged
from services.weights.transport import Gather, Sender, SendFailed, TrainedWeights

_FAILURES = (RuntimeError, TimeoutError, OSError)
"""What a group or a transfer raises when it breaks."""


class BroadcastSender(Sender):
    """Sends to a group whose members meet at a TCP store. A subclass knows the network."""

    def __init__(
        self,
        config: RunConfig,
        weights: TrainedWeights,
        rank: int,
        ranks: int,
        gather: Gather,
        bucket_bytes: int,
    ) -> None:
        self.sync, self.host = config.sync, config.sync.host or socket.gethostname()
        self._lead, self._scale = rank == 0, weights.scale
        parts = {name: [weights.parameters[part] for part in sources] for name, sources in weights.sources.items()}
        self._parts: Mapping[str, Sequence[torch.nn.Parameter]] = parts
        self.partitioned = any(hasattr(weight, "ds_id") for of_weight in parts.values() for weight in of_weight)
        """Whether weights are whole only until the next bucket is requested (ZeRO-3)."""
        names = _names(parts)
        first = {name: parts[name][0] for name, source in names.items() if name == source}
        order = list(first) if self.partitioned else as_they_lie(first)
        planned = plan_buckets([describe(name, first[name]) for name in order], bucket_bytes)
        aliases = {name: source for name, source in names.items() if name != source}
        self.manifest = msgspec.structs.replace(planned, aliases=aliases)
        """The manifest of every transfer."""
        self._store: Any = None
        self._group: Any = None  # ProcessGroupGloo, or vLLM's PyNcclCommunicator

    def form(self, store: Any, world_size: int) -> Any:
        """Return the connected group. Raises `RuntimeError` or `TimeoutError`."""
        raise NotImplementedError

    def broadcast(self, group: Any, gathered: Gathered, deadline: Deadline) -> None:
        """Send every bucket, each whole only until the next is requested, then the checksums. Raises one of `_FAILURES`."""
        raise NotImplementedError

    def open(self, fence: int) -> tuple[str, int]:
        """Listen on a free port."""
        self.close()
        try:
            self._store = rendezvous.open_store(self.host, self.sync.answer_s)
            rendezvous.publish_manifest(self._store, self.manifest)
        except (OSError, RuntimeError) as error:
            raise SendFailed(f"cannot open a weight group, check sync.host: {error}") from error
        return self.host, self._store.port

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Ask the store which ranks have not arrived."""
        return [] if self._store is None else rendezvous.absent(self._store, ranks)

    def connect(self, world_size: int) -> None:
        """Form the group within `sync.answer_s`."""
        try:
            self._group = self.form(self._store, world_size)
        except (RuntimeError, TimeoutError) as error:
            let_go(error)
            self.close()
            raise SendFailed(f"not all of {world_size - 1} receiving ranks joined: {error}") from error

    def send(self, version: int, fence: int, damaged: bool = False) -> None:
        """Send every weight within `sync.deadline_s`.

        Raises `SendFailed` also when a member breaks, and `torch.AcceleratorError` if the device of this process does.
        """
        gathered, deadline = self._gathered(), Deadline(self.sync.deadline_s)
        try:
            if self._lead:
                if self._group is None:
                    raise RuntimeError("the group is not connected")
                self.broadcast(self._group, self._merged(gathered), deadline)
        except _FAILURES as error:
            self._fail(error)
        finally:
            for _ in gathered:  # after a failure too: the other ranks continue gathering
                pass

    def _fail(self, error: Exception) -> NoReturn:
        if isinstance(error, torch.AcceleratorError):  # this process's device is lost to it: no other group or member helps
            raise error
        let_go(error)
        self.close()
        raise SendFailed(f"failed to send weights: {error}") from error

    def close(self) -> None:
        """Drop the group, which ends with its last reference, and its store."""
        self._group = self._store = None

    def _gathered(self) -> Iterator[Bucket]:
        """Yield each bucket while its weights are whole on this rank. Collective under ZeRO-3: all ranks must iterate to the
        end.
        """
        for bucket in self.manifest.buckets:
            with self.whole([part for meta in bucket.tensors for part in self._parts[meta.name]]):
                yield bucket

    def _merged(self, gathered: Iterator[Bucket]) -> Gathered:
        """Yield each bucket with its weights. If one cannot be built, `gathered` can still be iterated to the end."""
        for bucket in gathered:
            yield bucket, [self.merge(self._parts[meta.name]) for meta in bucket.tensors]

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weight that `parts` make up: a new tensor where there is an adapter."""
        return merged(list(parts), self._scale)

    def whole(self, weights: list[torch.nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        """Gather `weights` for the duration of a block. Collective under ZeRO-3."""
        if not self.partitioned:
            return contextlib.nullcontext()
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        return GatheredParameters(list({id(weight): weight for weight in weights}.values()))


def _names(parts: Mapping[str, Sequence[torch.nn.Parameter]]) -> dict[str, str]:
    """Return under which name each weight travels: its own, or the first of those that are tied.

    A tied weight is listed under each of its names, because an engine that repacks its weights holds two copies of it.
    """
    firsts: dict[tuple[int, ...], str] = {}
    return {name: firsts.setdefault(tuple(map(id, weights)), name) for name, weights in parts.items()}
