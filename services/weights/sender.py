"""The trainer's side of a weight transfer: rank 0 opens a group, every rank takes part in sending.

Guarantees: names are those of the Hugging Face model, with tied weights under each of their names; adapters are merged only into
what is sent; at most one bucket is gathered at a time, never the whole model; every wait has a limit; with `sync.verify`,
checksums follow, computed from the weights and not from buffers they are copied into; what changed is sent only if every member
acknowledged what it changes, and after any failure, all weights are sent. After a failure the group cannot be used
again: all ranks have gone through all gathers, so they stay in step, and rank 0 opens another group.
For the transports, see services/weights/transports. Buffers of the model are not sent, because training does not change them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import msgspec
import torch

from services.config import RunConfig
from services.weights.collective import BUCKET_BYTES, Bucket, Deadline, Gathered, let_go, plan_buckets
from services.weights.encoding_choice import EncodingChoice
from services.weights.host_memory import as_they_lie, describe
from services.weights.transports import FAILURES, make_transport
from services.weights.versions.broadcast import BroadcastEncoder, Heading

Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Builds a weight from its parts."""


class SendFailed(Exception):
    """The group could not be formed, or a transfer broke. Open another group under a new epoch."""


class Sender(Protocol):
    """What rounds need from a sender; see `WeightSender`."""

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

    def members_hold(self, version: int | None) -> None:
        """Say which version of this trainer all members of the next `send` hold; None: they hold several, others or none."""
        ...

    def took(self, seconds: float) -> None:
        """Take how long the last `send` took until every member had applied it."""
        ...

    def arrived_damaged(self) -> None:
        """Take that members found other bytes in the last version than were sent."""
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
        """Delete what nobody needs, including members that announced what they read."""
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
        it; it travels once.
        """
        self._sync, self._merge, self._parts = config.sync, merge, parts
        self._sender = rank == 0
        self._partitioned = any(hasattr(weight, "ds_id") for weights in parts.values() for weight in weights)
        names = _names(parts)
        first = {name: parts[name][0] for name, source in names.items() if name == source}
        order = list(first) if self._partitioned else as_they_lie(first)
        planned = plan_buckets([describe(name, first[name]) for name in order], bucket_bytes, config.sync.verify)
        aliases = {name: source for name, source in names.items() if name != source}
        deltas, sparse = config.sync.encoding != "full", config.sync.encoding == "sparse"
        self.manifest = msgspec.structs.replace(planned, aliases=aliases, deltas=deltas, sparse=sparse)
        """Return the manifest of every transfer."""
        self._transport = make_transport(config, fleeting=self._partitioned)
        frozen = [name for name in first if not any(weight.requires_grad for weight in parts[name])]
        self._encoder = BroadcastEncoder(self.manifest, frozen) if deltas and not sparse and self._sender else None
        self._choice = EncodingChoice(config.sync.encoding)
        self._label = (0, 0)  # fence and version
        self._last: dict[str, float] = {}
        self._sent: tuple[int, int] | None = None  # the same, of the weights that the encoder has a copy of
        self._members_hold: int | None = None
        self._chosen: bool | None = None  # whether the last `send` was a delta, if it could have been either

    sweeps = False
    """Return whether there may be something to sweep."""

    @property
    def sent(self) -> dict[str, float]:
        """Return what the last `send` took: bytes, share of all bytes, share of the elements that changed, 1 for a delta. Nothing
        with `sync.encoding = "full"`.
        """
        return self._last

    def label(self, version: int, fence: int) -> None:
        """Rank 0: say which version of which trainer the next `send` sends."""
        self._label = (fence, version)

    def members_hold(self, version: int | None) -> None:
        """Rank 0: say which version of this trainer all members of the next `send` hold, by their acknowledgements."""
        self._members_hold = version

    def took(self, seconds: float) -> None:
        """Rank 0: take how long the last `send` took until every member had applied it."""
        if self._chosen is not None:
            self._choice.took(self._chosen, seconds)

    def arrived_damaged(self) -> None:
        """Do nothing: nothing that was sent is kept to be read again."""

    def sweep(self, readers: Iterable[str]) -> None:
        """Rank 0: delete what is not needed by members that announced what they read. Groups keep nothing."""

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
        self._transport.close()
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

        Raises `SendFailed`, on rank 0 only, after `sync.transfer_deadline_s` or when a member breaks, and
        `torch.AcceleratorError` if the device of this process does.
        """
        gathered, deadline = self._gathered(), Deadline(self._sync.transfer_deadline_s)
        try:
            if self._sender:
                self._send(self._merged(gathered), deadline)
        except FAILURES as error:
            if self._chosen and deadline.passed:
                self._choice.too_slow()
            self._fail(error)
        finally:
            for _ in gathered:  # after a failure too: the other ranks continue gathering
                pass

    def _send(self, gathered: Gathered, deadline: Deadline) -> None:
        """Send all weights, or what changed if every member holds what was sent last."""
        if self._encoder is None:
            self._transport.send(gathered, self.manifest, deadline)
            return
        (fence, version), base, sent = self._label, self._members_hold, self._sent
        self._sent = self._members_hold = self._chosen = None  # until all of it is sent
        possible = base is not None and base < version and sent == (fence, base)
        delta = possible and self._choice.delta()
        self._chosen = delta if possible else None
        if delta:
            assert base is not None
            encoded = self._encoder.encode(gathered, base, fence, version)
            self._transport.send_delta(encoded, deadline)
            nbytes, changed = encoded.heading.nbytes, encoded.changed
        else:
            self._transport.send(self._encoder.remember(gathered), self.manifest, deadline, Heading(fence, version))
            nbytes, changed = self.manifest.nbytes, 1.0
        self._sent = (fence, version)
        share = nbytes / max(1, self.manifest.nbytes)
        self._last = {"bytes": float(nbytes), "share": share, "changed": changed, "delta": float(delta)}

    def _fail(self, error: Exception) -> NoReturn:
        if isinstance(error, torch.AcceleratorError):  # this process's device is lost to it: no other group or member helps
            raise error
        let_go(error)
        self.close_group()
        raise SendFailed(f"failed to send weights: {error}") from error

    def close_group(self) -> None:
        """Rank 0: drop the group and its store, if any; the next transfer has all weights."""
        self._transport.close()
        self._sent = None

    def _gathered(self) -> Iterator[Bucket]:
        """Yield each bucket while its weights are whole on this rank. Collective under ZeRO-3: all ranks must iterate to the
        end.
        """
        for bucket in self.manifest.buckets:
            with self._whole([part for meta in bucket.tensors for part in self._parts[meta.name]]):
                yield bucket

    def _merged(self, gathered: Iterator[Bucket]) -> Gathered:
        """Yield each bucket with its weights. If one cannot be built, `gathered` can still be iterated to the end."""
        for bucket in gathered:
            yield bucket, [self._merge(self._parts[meta.name]) for meta in bucket.tensors]

    def _whole(self, weights: list[torch.nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        if not self._partitioned:
            return contextlib.nullcontext()
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        return GatheredParameters(list({id(weight): weight for weight in weights}.values()))


def _names(parts: Mapping[str, Sequence[torch.nn.Parameter]]) -> dict[str, str]:
    """Return under which name each weight travels: its own, or the first of those that are tied."""
    firsts: dict[tuple[int, ...], str] = {}
    return {name: firsts.setdefault(tuple(map(id, weights)), name) for name, weights in parts.items()}
