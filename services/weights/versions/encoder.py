"""The bits that a rank published last, and what has changed since.

Guarantees: `encode` brings its copy (the base) to the weights' current bits and returns the change that does so; `whole`
describes the base itself, so an anchor can be written from it while training continues. Each rank encodes its own pieces: no
weight is gathered, at any ZeRO stage.
Cost: a copy in host memory of this rank's pieces, which over all ranks is one copy of the weights; reading them and the copy once
a version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from services.weights.buckets import huge_pages
from services.weights.checksums import checksums
from services.weights.versions.manifest import Block, TensorPiece
from services.weights.versions.pieces import UNCHANGED, EncodedPiece, encode

PIECE_BYTES = 16 << 20
"""Largest piece. Pieces are dealt out to the ranks, so smaller ones share the work better; each costs 100 bytes of manifest."""

PART_BYTES = 16 << 20
"""Size at which a part of an anchor ends. A reader fetches and decodes several at a time."""

_ALIGNMENT = 64


@dataclass(frozen=True)
class Shard:
    """A run of elements of a parameter that this rank encodes."""

    tensor: int  # index of the parameter among all
    start: int
    count: int
    frozen: bool  # training does not change it
    read: Callable[[], torch.Tensor]
    """Return its present elements, [count], contiguous."""


@dataclass(frozen=True)
class EncodedPart:
    """A part with its pieces, whose part index is still 0, and its bytes in one or more buffers."""

    name: str
    nbytes: int
    pieces: list[TensorPiece]
    buffers: Sequence[bytearray | memoryview]


def whole_shards(parameters: Mapping[str, torch.nn.Parameter], rank: int, ranks: int) -> list[Shard]:
    """Return the shards of `rank`, for weights that are whole on every rank: pieces are dealt out in turn."""
    shards: list[Shard] = []
    turn = 0
    for index, parameter in enumerate(parameters.values()):
        limit = max(1, PIECE_BYTES // parameter.element_size())
        for start in range(0, max(1, parameter.numel()), limit):
            count = min(limit, parameter.numel() - start)
            if turn % ranks == rank:
                shards.append(Shard(index, start, count, not parameter.requires_grad, _reader(parameter, start, count)))
            turn += 1
    return shards


def partition_shards(parameters: Mapping[str, torch.nn.Parameter], rank: int) -> list[Shard]:
    """Return the shards of `rank` for weights that ZeRO-3 partitions: its own partition of each."""
    shards: list[Shard] = []
    for index, parameter in enumerate(parameters.values()):
        partition: torch.Tensor = parameter.ds_tensor  # pyright: ignore[reportAttributeAccessIssue]
        size, numel = partition.numel(), int(parameter.ds_numel)  # pyright: ignore[reportAttributeAccessIssue]
        begin, end = min(numel, rank * size), min(numel, (rank + 1) * size)  # the last partitions are padded
        limit = max(1, PIECE_BYTES // partition.element_size())
        starts = range(begin, end, limit) if numel else range(1 if rank == 0 else 0)
        for start in starts:
            count = min(limit, end - start)
            read = _partition_reader(parameter, start - begin, count)
            shards.append(Shard(index, start, count, not parameter.requires_grad, read))
    return shards


def rounded(shard: Shard, dtype: torch.dtype) -> Shard:
    """Return a shard whose elements are read in `dtype`."""
    return replace(shard, read=lambda: shard.read().to(dtype))


class ShardEncoder:
    """Encodes the shards of one rank."""

    def __init__(self, shards: Sequence[Shard], rank: int) -> None:
        self._shards, self._rank = shards, rank
        self._base: list[np.ndarray] = []  # of each shard, unsigned; empty until the first version

    def load(self) -> None:
        """Take the present bits as the base."""
        if not self._base:
            self._base = self._allocate()
        for shard, base in zip(self._shards, self._base, strict=True):
            base[:] = bits(shard.read())

    def encode(self) -> EncodedPart:
        """Return what changed since the base, which becomes the present bits. Needs a `load` before."""
        made: list[EncodedPiece] = []
        data = bytearray()
        offsets: list[int] = []
        for shard, base in zip(self._shards, self._base, strict=True):
            new = base if shard.frozen else bits(shard.read())
            piece = UNCHANGED if shard.frozen else encode(new, base)
            offsets.append(len(data))
            for stored, _, _ in piece.blocks:
                data += stored
            if piece.changed:
                base[:] = new
            made.append(piece)
        return EncodedPart(f"{self._rank}.0", len(data), self._described(self._shards, self._base, made, offsets), [data])

    def whole(self) -> Iterator[EncodedPart]:
        """Yield the base itself in parts. Nothing is copied: the base must not change before a part is written."""
        shards: list[Shard] = []
        bases: list[np.ndarray] = []
        number = 0
        for i, (shard, base) in enumerate(zip(self._shards, self._base, strict=True)):
            shards.append(shard)
            bases.append(base)
            sizes = [base.nbytes for base in bases]
            if sum(sizes) >= PART_BYTES or i == len(self._shards) - 1:
                pieces = self._described(shards, bases, [encode(base, None) for base in bases], [0, *accumulate(sizes[:-1])])
                buffers = [base.data.cast("B") for base in bases if base.nbytes]
                yield EncodedPart(f"{self._rank}.{number}", sum(sizes), pieces, buffers)
                shards, bases, number = [], [], number + 1

    def _described(
        self, shards: Sequence[Shard], elements: Sequence[np.ndarray], made: Sequence[EncodedPiece], offsets: Sequence[int]
    ) -> list[TensorPiece]:
        """Return the pieces with the checksums of their elements."""
        sums = checksums(as_tensor(array) for array in elements).tolist()
        return [
            TensorPiece(
                shard.tensor,
                shard.start,
                shard.count,
                piece.changed,
                piece.encoding,
                0,
                offset,
                [Block(len(stored), raw, compressed) for stored, raw, compressed in piece.blocks],
                (first, second),
            )
            for shard, piece, offset, (first, second) in zip(shards, made, offsets, sums, strict=True)
        ]

    def _allocate(self) -> list[np.ndarray]:
        """Return memory for each shard, aligned, in one block."""
        sizes = [(shard.count, shard.read().element_size()) for shard in self._shards]
        padded = [-(-count * size // _ALIGNMENT) * _ALIGNMENT for count, size in sizes]
        memory = huge_pages(sum(padded)).numpy()
        return [
            memory[end - room : end - room + count * size].view(f"u{size}")
            for (count, size), room, end in zip(sizes, padded, accumulate(padded), strict=True)
        ]


def bits(elements: torch.Tensor) -> np.ndarray:
    """Return contiguous elements as unsigned integers, [count], sharing their memory if they are in host memory."""
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[elements.element_size()]
    return elements.detach().view(-1).view(signed).cpu().numpy().view(f"u{elements.element_size()}")


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return unsigned integers as a tensor of the same bytes, sharing their memory."""
    return torch.from_numpy(array.view(np.uint8))


def _reader(parameter: torch.Tensor, start: int, count: int) -> Callable[[], torch.Tensor]:
    return lambda: parameter.detach().contiguous().view(-1)[start : start + count]


def _partition_reader(parameter: Any, start: int, count: int) -> Callable[[], torch.Tensor]:
    return lambda: parameter.ds_tensor.detach().view(-1)[start : start + count]
