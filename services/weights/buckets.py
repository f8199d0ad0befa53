"""How weights are laid out in a transfer: tensors, described, in buckets.

Imports torch; of `runtime` it imports nothing.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator

import msgspec
import torch

BUCKET_BYTES = 32 << 20
"""Size of the buckets in which weights are gathered and broadcast, several at a time. Larger ones hold more memory and start
later; in smaller ones, the fixed cost of a broadcast shows.
"""

_ALIGNMENT = 64  # bytes; torch's own alignment, so that weights laid out like a bucket are as fast as in their own memory


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """The description of one tensor."""

    name: str  # Hugging Face parameter name
    dtype: str  # attribute of torch, e.g. bfloat16
    shape: list[int]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


def describe(name: str, weight: torch.Tensor) -> TensorMeta:
    """Return the description of `weight`; for a partitioned one (ZeRO-3) with its whole shape."""
    return TensorMeta(name, str(weight.dtype).removeprefix("torch."), list(getattr(weight, "ds_shape", weight.shape)))


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that are sent in one broadcast, stored contiguously at their offsets."""

    tensors: list[TensorMeta]
    offsets: list[int]  # bytes
    nbytes: int

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors inside `buffer` (uint8, at least `nbytes` long), sharing its memory."""
        return [
            (meta.name, buffer[offset : offset + meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape))
            for meta, offset in zip(self.tensors, self.offsets, strict=True)
        ]


Gathered = Iterator[tuple[Bucket, list[torch.Tensor]]]
"""Buckets with their tensors, in the manifest's order, each whole until the next is requested."""


class WeightManifest(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one transfer sends, in order. The checksums of all tensors, [tensors, 2] int64, follow the last bucket."""

    buckets: list[Bucket]
    aliases: dict[str, str] = {}  # further names of tied weights, which travel once -> the name they travel under

    @property
    def nbytes(self) -> int:
        """Return the bytes of one transfer without checksums."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def tensors(self) -> list[TensorMeta]:
        """Return every tensor, in the order sent."""
        return [meta for bucket in self.buckets for meta in bucket.tensors]

    def with_aliases(self, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Return `weights`, with tied ones under each of their names; these share memory."""
        held = dict(weights)
        return weights + [(name, held[source]) for name, source in self.aliases.items() if source in held]


def plan_buckets(tensors: Iterable[TensorMeta], bucket_bytes: int) -> WeightManifest:
    """Pack tensors, in the order given, into buckets of at most `bucket_bytes`; a larger tensor gets its own bucket."""
    buckets: list[Bucket] = []
    group: list[TensorMeta] = []
    offsets: list[int] = []
    end = 0
    for meta in tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if group and start + meta.nbytes > bucket_bytes:
            buckets.append(Bucket(group, offsets, end))
            group, offsets, start = [], [], 0
        group.append(meta)
        offsets.append(start)
        end = start + meta.nbytes
    if group:
        buckets.append(Bucket(group, offsets, end))
    return WeightManifest(buckets)


def huge_pages(nbytes: int) -> torch.Tensor:
    """Return [nbytes] uint8 zeros, in huge pages if the system has them: the first use of each page costs a page fault."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the system has no huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
