"""Versions by broadcast: rounds of `gloo`, `nccl` and `filesystem` that send what changed (`sync.encoding`, docs/sync.md).

A heading precedes every transfer and says which version it is, and whether all weights follow or a delta: one payload of manifest
and data, encoded as in a store of versions.
Guarantees: a delta is applied to exactly the bits it was made from, or not at all; every piece, changed or not, is compared with
the checksum of the result, and whatever fails leaves what was held before (mirror.py); sizes are checked before memory is
allocated for them.
Cost: for the sender a copy of the weights in host memory, and reading both once a round; for each receiving rank one, which the
receivers of `gloo` have anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import ProcessGroupGloo

from services.weights import collective
from services.weights.checksums import WeightChanged
from services.weights.collective import Deadline, Gathered, WeightManifest, broadcast, huge_pages
from services.weights.versions import manifest as manifests
from services.weights.versions.delta import Delta
from services.weights.versions.encoder import PIECE_BYTES, EncodedPart, Shard, ShardEncoder
from services.weights.versions.manifest import DataPart, Weight
from services.weights.versions.mirror import WeightMirror
from services.weights.versions.positions import InvalidVersion

MANIFEST_BYTES = 256 << 20
"""Largest manifest that a receiver allocates: about 100 bytes for each piece, so enough for 16 TiB of weights."""


@dataclass(frozen=True)
class Heading:
    """What precedes a transfer."""

    fence: int
    version: int
    manifest_nbytes: int = 0  # 0: all weights follow
    data_nbytes: int = 0

    @property
    def is_delta(self) -> bool:
        """Return whether a delta follows."""
        return self.manifest_nbytes > 0

    @property
    def nbytes(self) -> int:
        """Return the length of a delta's payload."""
        return self.manifest_nbytes + self.data_nbytes

    def encoded(self) -> torch.Tensor:
        """Return the heading as [4] int64."""
        return torch.tensor([self.fence, self.version, self.manifest_nbytes, self.data_nbytes])

    @classmethod
    def decoded(cls, encoded: torch.Tensor, manifest: WeightManifest) -> Heading:
        """Return the heading of a transfer that `manifest` describes. Raises `InvalidVersion`."""
        if encoded.shape != (4,) or encoded.dtype != torch.int64:
            raise InvalidVersion("a transfer has no heading")
        heading = cls(*encoded.tolist())
        if not 0 <= heading.manifest_nbytes <= MANIFEST_BYTES or not 0 <= heading.data_nbytes <= manifest.nbytes:
            raise InvalidVersion(f"a delta of {heading.manifest_nbytes} + {heading.data_nbytes} bytes is impossible")
        return heading


@dataclass(frozen=True)
class EncodedDelta:
    """A delta to be sent."""

    heading: Heading
    payload: torch.Tensor  # [nbytes] uint8, host memory: manifest, then data
    changed: float  # share of the elements


class BroadcastEncoder:
    """The sender's copy of the weights it sent last, which deltas start from. Buckets are encoded while they are gathered."""

    def __init__(self, manifest: WeightManifest, frozen: Collection[str] = ()) -> None:
        """`frozen` names weights that training does not change."""
        self._manifest = manifest
        self._present: list[torch.Tensor] = []  # the bucket being read
        self._encoders = list(self._shard(set(frozen)))

    def _shard(self, frozen: set[str]) -> Iterator[ShardEncoder]:
        index = 0
        for number, bucket in enumerate(self._manifest.buckets):
            shards: list[Shard] = []
            for place, meta in enumerate(bucket.tensors):
                itemsize = getattr(torch, meta.dtype).itemsize
                count, limit = meta.nbytes // itemsize, max(1, PIECE_BYTES // itemsize)
                for start in range(0, max(1, count), limit):
                    length = min(limit, count - start)
                    shards.append(Shard(index, start, length, meta.name in frozen, self._reader(place, start, length)))
                index += 1
            yield ShardEncoder(shards, number)

    def _reader(self, place: int, start: int, count: int) -> Callable[[], torch.Tensor]:
        return lambda: self._present[place].detach().contiguous().view(-1)[start : start + count]

    def remember(self, gathered: Gathered) -> Gathered:
        """Yield the buckets, and take their bits as those sent last."""
        for encoder, (bucket, tensors) in zip(self._encoders, gathered, strict=True):
            self._present = tensors
            encoder.load()
            self._present = []
            yield bucket, tensors

    def encode(self, gathered: Gathered, base: int, fence: int, version: int) -> EncodedDelta:
        """Return what has changed since `base` was sent; the present bits are then those sent last."""
        parts: list[EncodedPart] = []
        for encoder, (_, tensors) in zip(self._encoders, gathered, strict=True):
            self._present = tensors
            parts.append(encoder.encode())
            self._present = []
        made = manifests.assemble(
            version,
            fence,
            base,
            self._manifest.tensors,
            named(self._manifest),
            [(DataPart(part.name, part.nbytes), part.pieces) for part in parts],
        )
        described = manifests.encode(made)
        payload = huge_pages(len(described) + made.nbytes)
        view, end = payload.numpy().data, 0
        by_name = {part.name: part for part in parts}
        for buffer in (described, *(buffer for part in made.parts for buffer in by_name[part.name].buffers)):
            view[end : end + len(buffer)] = buffer
            end += len(buffer)
        elements = sum(piece.count for piece in made.pieces)
        return EncodedDelta(Heading(fence, version, len(described), made.nbytes), payload, made.changed / max(1, elements))


def named(manifest: WeightManifest) -> list[Weight]:
    """Return the weights that the tensors of a transfer are, tied ones under each of their names."""
    places = {meta.name: i for i, meta in enumerate(manifest.tensors)}
    names = {name: name for name in places} | manifest.aliases
    return [Weight(name, [places[source]], 0.0) for name, source in names.items()]


def adopt(mirror: WeightMirror, heading: Heading, manifest: WeightManifest, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Keep a whole set of weights, from which the next delta starts."""
    held = dict(weights)
    metas = manifest.tensors
    mirror.adopt((heading.fence, heading.version), metas, [held[meta.name] for meta in metas], named(manifest))


def apply(mirror: WeightMirror, heading: Heading, payload: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Bring the mirror to a delta's version and return its weights, which share its memory.

    Raises `InvalidVersion`, which leaves it as it was, or `WeightChanged`, after which it holds nothing: either what arrived was
    damaged, or what was held.
    """
    data = payload.numpy().data
    made = manifests.decode(data[: heading.manifest_nbytes])
    if (made.fence, made.version) != (heading.fence, heading.version) or made.base is None:
        raise InvalidVersion(f"a delta for version {heading.version} describes version {made.version} of trainer {made.fence}")
    parts: list[tuple[int, memoryview]] = []
    start = heading.manifest_nbytes
    for i, part in enumerate(made.parts):
        parts.append((i, data[start : start + part.nbytes]))
        start += part.nbytes
    try:
        mirror.apply(Delta(made, parts))
    except WeightChanged:
        mirror.forget()
        raise
    return mirror.weights()


def receive(
    group: ProcessGroupGloo,
    manifest: WeightManifest,
    deadline: Deadline,
    buffers: dict[int, torch.Tensor],
    mirror: WeightMirror,
) -> list[tuple[str, torch.Tensor]]:
    """Receive one transfer into host memory as `collective.receive` does, or a delta of what `mirror` holds.

    Raises like that, and `InvalidVersion`.
    """
    if not manifest.deltas:
        return collective.receive(group, manifest, deadline, buffers)
    encoded = torch.empty(4, dtype=torch.int64)
    broadcast(group, encoded, deadline)
    heading = Heading.decoded(encoded, manifest)
    if heading.is_delta:
        payload = huge_pages(heading.nbytes)
        broadcast(group, payload, deadline)
        return apply(mirror, heading, payload)
    mirror.forget()  # its memory is reused to receive into
    weights = collective.receive(group, manifest, deadline, buffers)
    adopt(mirror, heading, manifest, weights)
    return weights
