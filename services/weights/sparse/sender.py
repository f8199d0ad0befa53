"""The trainer's side of `sync.encoding = "sparse"`: every rank finds what changed in its share, rank 0 sends it on.

Guarantees: those of services/weights/sender.py; no weight is gathered and nothing is copied to host memory for a patch; all ranks
decide alike whether one is sent, because they decide from the same numbers, so none waits for another; a rank that fails costs
one transfer of all weights; every `WHOLE_EVERY`th transfer sends all weights, so a fault that no comparison can see (a weight
that changed in a generator's memory and never again in training) does not persist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog
import torch

from services.config import ConfigError, RunConfig
from services.weights.collective import BUCKET_BYTES, Deadline
from services.weights.sender import Merge, WeightSender
from services.weights.sparse.encoder import ChangeEncoder
from services.weights.sparse.patch import Patch, PatchRow, assemble
from services.weights.transports import FAILURES
from services.weights.versions.broadcast import MANIFEST_BYTES, Heading
from services.weights.versions.encoder import partition_shards, whole_shards
from services.weights.versions.sender import PAYS, Gather

log = structlog.get_logger()

WHOLE_EVERY = 32
"""One transfer in this many sends all weights, at 3 % of the cost of always sending them."""

Relay = Callable[[torch.Tensor | None, int, int], torch.Tensor | None]
"""Moves bytes from a rank (third argument) to rank 0: the rank passes them, rank 0 receives them, of a length that both know
(second argument). On the device of the weights. For these two ranks only."""


@dataclass(frozen=True)
class Order:
    """What rank 0 wants sent."""

    fence: int
    version: int
    base: int | None  # None: all weights


class SparseWeightSender(WeightSender):
    """Sends patches to members that write them into their models, and all weights otherwise."""

    def __init__(
        self,
        config: RunConfig,
        parts: Mapping[str, Sequence[torch.nn.Parameter]],
        merge: Merge,
        rank: int,
        ranks: int,
        gather: Gather,
        relay: Relay,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`gather` returns the values of all ranks, by rank; the others as for `WeightSender`.

        Raises `ConfigError` for adapters: every element of a merged weight may change, and no rank has a share of it.
        """
        if any(len(weights) > 1 for weights in parts.values()):
            raise ConfigError('sync.encoding = "sparse" sends no adapters: set "full" or "delta", or lora.rank = 0')
        super().__init__(config, parts, merge, rank, bucket_bytes)
        self._rank, self._gather, self._relay = rank, gather, relay
        sent = {meta.name: parts[meta.name][0] for meta in self.manifest.tensors}
        shards = partition_shards(sent, rank) if self._partitioned else whole_shards(sent, rank, ranks)
        self._changes = ChangeEncoder(shards, rank)
        self._elements = sum(weight.numel() if not self._partitioned else int(weight.ds_numel) for weight in sent.values())  # type: ignore[attr-defined]
        self._patches = 0  # since all weights were sent to members that take patches
        self._to_holders = False  # whether the members of this transfer all hold what was sent last
        self._refusing: list[int] = []  # ranks of the last group that took no patches

    def send(self) -> None:
        """All ranks: send what changed, or every weight. Collective.

        Raises `SendFailed`, on rank 0 only, after `sync.transfer_deadline_s` or when a member breaks.
        """
        order: Order = self._gather(self._decide() if self._sender else None)[0]
        if order.base is None or not self._send_changes(order, order.base):
            self._send_whole(order)

    def _decide(self) -> Order:
        """Rank 0: a patch goes to members that all hold what was sent last and can write into their models."""
        (fence, version), base, sent = self._label, self._members_hold, self._sent
        self._sent = self._members_hold = None  # until all of it is sent
        self._to_holders = base is not None  # and no newcomers, which are sent all weights alone
        possible = base is not None and base < version and sent == (fence, base) and self._patches < WHOLE_EVERY - 1
        try:
            refusing = self._transport.unpatchable() if possible else self._refusing
        except FAILURES:  # the rendezvous is gone: the send that follows says so, on all ranks
            return Order(fence, version, None)
        if refusing and refusing != self._refusing:
            log.warning("some workers take no patches, so all weights are sent; their logs say why", ranks=refusing)
        self._refusing = refusing
        return Order(fence, version, base if possible and not refusing else None)

    def _send_changes(self, order: Order, base: int) -> bool:
        """Send a patch. Returns False, on all ranks, if all weights must be sent instead."""
        problem, rows, data = self._encode()
        told: list[tuple[str, list[PatchRow]]] = self._gather((problem, rows))  # all ranks decide from the same rows
        if problems := [said for said, _ in told if said]:
            if self._sender:
                log.warning("failed to find what changed, so all weights are sent", errors=problems)
            return False
        patch = assemble(base, [row for _, of_rank in told for row in of_rank], self.manifest)
        heading = patch.heading(order.fence, order.version)
        if heading.nbytes > PAYS * self.manifest.nbytes or heading.manifest_nbytes > MANIFEST_BYTES:
            return False
        parts = self._collected(patch, data)
        try:
            if self._sender:
                self._transport.send_patch(patch, parts, heading, Deadline(self._sync.transfer_deadline_s))
        except FAILURES as error:
            self._fail(error)
        finally:
            for _ in parts:  # after a failure too: the other ranks give theirs
                pass
        self._sent, self._patches = (order.fence, order.version), self._patches + 1
        self._say(heading.nbytes, patch.changed / max(1, self._elements), delta=True)
        return True

    def _send_whole(self, order: Order) -> None:
        """Send all weights, from which later patches start."""
        problem = self._load()
        problems = [said for said in self._gather(problem) if said]
        gathered = self._gathered()
        try:
            if self._sender:
                deadline = Deadline(self._sync.transfer_deadline_s)
                self._transport.send(self._merged(gathered), self.manifest, deadline, Heading(order.fence, order.version))
        except FAILURES as error:
            self._fail(error)
        finally:
            for _ in gathered:  # after a failure too: the other ranks continue gathering
                pass
        if problems and self._sender:
            log.warning("failed to copy the weights that later patches start from", errors=problems)
        self._sent = None if problems else (order.fence, order.version)
        self._patches = 0 if self._to_holders else self._patches
        self._say(self.manifest.nbytes, 1.0, delta=False)

    def _encode(self) -> tuple[str, list[PatchRow], torch.Tensor]:
        try:
            rows, data = self._changes.encode()
            return "", rows, torch.cat(data) if data else torch.empty(0, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:  # no memory
            return f"rank {self._rank}: {error}", [], torch.empty(0, dtype=torch.uint8)

    def _load(self) -> str:
        try:
            self._changes.load()
        except (RuntimeError, MemoryError) as error:  # no memory
            return f"rank {self._rank}: {error}"
        return ""

    def _collected(self, patch: Patch, mine: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the data of each rank on rank 0; elsewhere send this rank's data and yield nothing.

        Collective: iterate to the end.
        """
        sizes: dict[int, int] = {}
        for row, nbytes in zip(patch.rows, patch.sizes, strict=True):
            sizes[row.part] = sizes.get(row.part, 0) + nbytes
        for rank, nbytes in sizes.items():
            if rank == 0 == self._rank:
                yield mine
            elif self._rank in (0, rank):
                data = self._relay(mine if self._rank else None, nbytes, rank)
                if data is not None:
                    yield data

    def _say(self, nbytes: int, changed: float, delta: bool) -> None:
        share = nbytes / max(1, self.manifest.nbytes)
        self._last = {"bytes": float(nbytes), "share": share, "changed": changed, "delta": float(delta)}
