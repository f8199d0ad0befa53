"""The manifest of a version: which tensors it holds, where each piece of them is, and the checksum of each piece's result.

Guarantees: a manifest that `decode` returns is the one that was encoded, which a digest at its end verifies.
A version never changes: its name is (trainer's fence, version, kind), and whoever writes it writes the manifest last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from services.weights.buckets import TensorMeta
from services.weights.versions.catalogue import InvalidVersion

FORMAT = 3
DIGEST_BYTES = 16


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes in a part."""

    stored: int  # bytes in the part
    raw: int  # bytes after decompression
    compressed: bool


class TensorPiece(msgspec.Struct, frozen=True, array_like=True):
    """A run of elements of one flattened tensor."""

    tensor: int  # index among the manifest's tensors
    start: int  # first element
    count: int
    changed: int  # elements whose bits differ from the base; with `whole`, all
    encoding: str
    """`same`: nothing changed; `gaps`: positions, and the differences there; `dense`: the differences of all elements; `whole`:
    the elements themselves, which alone need no base."""
    part: int  # index among the manifest's parts
    offset: int  # of the first block in the part, bytes; the others follow
    blocks: list[Block]  # positions, if any, then one for each byte of an element, the lowest first; with `whole` a single one
    checksum: tuple[int, int]  # of the result, two int64 (services/weights/checksums.py)


class DataPart(msgspec.Struct, frozen=True, array_like=True):
    """One object of data."""

    name: str
    nbytes: int


class Weight(msgspec.Struct, frozen=True, array_like=True):
    """A weight under its Hugging Face name: a tensor itself, or a frozen one merged with an adapter's A and B."""

    name: str
    sources: list[int]  # indices among the manifest's tensors: one, or W, A and B
    scale: float  # of B A


class VersionManifest(msgspec.Struct, frozen=True):
    """Everything about one version but its bytes."""

    format: int
    version: int
    fence: int
    base: int | None  # the version, of the same trainer, whose bits the differences start from; None for an anchor
    tensors: list[TensorMeta]
    pieces: list[TensorPiece]
    parts: list[DataPart]
    weights: list[Weight]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the data."""
        return sum(part.nbytes for part in self.parts)

    @property
    def full_nbytes(self) -> int:
        """Return the bytes of the tensors."""
        return sum(meta.nbytes for meta in self.tensors)

    @property
    def changed(self) -> int:
        """Return the number of changed elements."""
        return sum(piece.changed for piece in self.pieces)


def assemble(
    version: int,
    fence: int,
    base: int | None,
    tensors: list[TensorMeta],
    weights: list[Weight],
    parts: Iterable[tuple[DataPart, list[TensorPiece]]],
) -> VersionManifest:
    """Return the manifest of `parts`, each with its pieces, which may come in any order."""
    named = sorted(parts, key=lambda part: part[0].name)
    pieces = [msgspec.structs.replace(piece, part=i) for i, (_, of_part) in enumerate(named) for piece in of_part]
    pieces.sort(key=lambda piece: (piece.tensor, piece.start))
    return VersionManifest(FORMAT, version, fence, base, tensors, pieces, [part for part, _ in named], weights)


def encode(manifest: VersionManifest) -> bytes:
    """Return the manifest as bytes."""
    described = msgspec.msgpack.encode(manifest)
    return described + _digest(described)


def decode(encoded: bytes | memoryview) -> VersionManifest:
    """Return the manifest in `encoded`. Raises `InvalidVersion` if its bytes have changed, or are of another format."""
    described, digest = encoded[:-DIGEST_BYTES], encoded[-DIGEST_BYTES:]
    if _digest(described) != digest:
        raise InvalidVersion("this is no manifest, or some of its bytes have changed")
    try:
        manifest = msgspec.msgpack.decode(described, type=VersionManifest)
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise InvalidVersion(f"this is no manifest: {error}") from None
    if manifest.format != FORMAT:
        raise InvalidVersion(
            f"a manifest of format {manifest.format}, here {FORMAT} is known: run one release of grpo everywhere"
        )
    return manifest


def _digest(described: bytes | memoryview) -> bytes:
    """Return BLAKE2b of a manifest: pieces have checksums of their own, but names, sources and scales of weights do not."""
    return hashlib.blake2b(described, digest_size=DIGEST_BYTES).digest()
