"""The bits of this rank's share of the weights when they were sent last, and what has changed since.

Guarantees: `encode` brings its copy (the base) to the current bits and returns the change that does so. Each rank has pieces of
its own (versions/encoder.py): its partitions under ZeRO-3, otherwise every n-th piece. Nothing is gathered.
Cost: a copy of this rank's share on the device of the weights, which over all ranks is one copy of the weights that are trained;
reading both once a version.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.weights.sparse.changes import bits, changed_positions
from services.weights.sparse.patch import PatchRow, encode_row, with_checksums
from services.weights.versions.encoder import Shard


class ChangeEncoder:
    """Encodes the shards of one rank."""

    def __init__(self, shards: Sequence[Shard], rank: int) -> None:
        self._shards, self._rank = [shard for shard in shards if not shard.frozen and shard.count], rank
        self._base: list[torch.Tensor] = []  # bits of each shard; empty until the first version

    @torch.no_grad()
    def load(self) -> None:
        """Take the present bits as the base."""
        if not self._base:
            self._base = [bits(shard.read()).clone() for shard in self._shards]
            return
        for shard, base in zip(self._shards, self._base, strict=True):
            base.copy_(bits(shard.read()))

    @torch.no_grad()
    def encode(self) -> tuple[list[PatchRow], list[torch.Tensor]]:
        """Return what changed since the base, which becomes the present bits: rows, and the data of each. Needs a `load`
        before.
        """
        rows: list[PatchRow] = []
        data: list[torch.Tensor] = []
        for shard, base in zip(self._shards, self._base, strict=True):
            new = bits(shard.read())
            positions = changed_positions(new, base)
            if positions.numel():
                replaced, there = base[positions], new[positions]
                row, encoded = encode_row(shard.tensor, shard.start, shard.count, self._rank, positions, replaced, there)
                base[positions] = there
                rows.append(row)
                data.append(encoded)
        return with_checksums(rows, data), data
