"""The manifest of a version: which tensors it holds, where each piece of them is, and the checksum of each piece's result.

Guarantees: a manifest that `decode` returns is the one that was encoded, which a digest at its end verifies, and is consistent:
its pieces cover every tensor exactly once, in order, every piece lies inside its part, no two overlap, and no size exceeds what
its tensor can need. A reader may therefore allocate what a manifest says.
A version never changes: its name is (trainer's fence, version, kind), and whoever writes it writes the manifest last.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import msgspec
import torch

from services.weights.buckets import TensorMeta
from services.weights.versions.positions import InvalidVersion

FORMAT = 2
DIGEST_BYTES = 16
FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
DTYPES = (*FLOATS, "uint8", "int8", "int16", "int32", "int64", "bool")
SAME, GAPS, BITMAP, DENSE, WHOLE = "same", "gaps", "bitmap", "dense", "whole"
"""How a piece is encoded: nothing changed; positions as gaps or as a bitmap, and the differences there; the differences of all
elements; or the elements themselves, which alone need no base."""


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
    """Return the manifest in `encoded`, which need not be trusted. Raises `InvalidVersion`."""
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
    _check_tensors(manifest)
    _check_pieces(manifest)
    _check_places(manifest)
    return manifest


def _digest(described: bytes | memoryview) -> bytes:
    """Return BLAKE2b of a manifest: pieces have checksums of their own, but names, sources and scales of weights do not."""
    return hashlib.blake2b(described, digest_size=DIGEST_BYTES).digest()


def _check_tensors(manifest: VersionManifest) -> None:
    names = [meta.name for meta in manifest.tensors]
    if len(set(names)) != len(names):
        raise InvalidVersion("a tensor occurs twice")
    for meta in manifest.tensors:
        if meta.dtype not in DTYPES or any(not 0 <= size < 2**48 for size in meta.shape) or math.prod(meta.shape) >= 2**48:
            raise InvalidVersion(f"tensor {meta.name!r} has the impossible type {meta.dtype!r} or shape {meta.shape}")
    for weight in manifest.weights:
        if len(weight.sources) not in (1, 3) or not all(0 <= index < len(names) for index in weight.sources):
            raise InvalidVersion(f"weight {weight.name!r} is made of tensors that do not exist")
        w, *adapter = (manifest.tensors[index] for index in weight.sources)
        if adapter:
            shapes = [tuple(meta.shape) for meta in (w, *adapter)]
            rank = shapes[1][0] if shapes[1] else 0
            if len(w.shape) != 2 or shapes[1:] != [(rank, w.shape[1]), (w.shape[0], rank)] or not math.isfinite(weight.scale):
                raise InvalidVersion(f"weight {weight.name!r} is merged from tensors of shapes {shapes}")


def _check_pieces(manifest: VersionManifest) -> None:
    tensor, end = -1, 0
    for piece in manifest.pieces:
        if piece.tensor != tensor:
            if piece.tensor != tensor + 1 or piece.tensor >= len(manifest.tensors) or end != _elements(manifest, tensor):
                raise InvalidVersion("the pieces do not cover the tensors in their order")
            tensor, end = piece.tensor, 0
        if piece.start != end or piece.count < 0 or not 0 <= piece.changed <= piece.count:
            raise InvalidVersion(f"a piece of {manifest.tensors[tensor].name!r} begins at {piece.start} instead of {end}")
        end += piece.count
        itemsize = _itemsize(manifest.tensors[tensor])
        if [block.raw for block in piece.blocks] != _raw_sizes(piece, itemsize, manifest.base):
            raise InvalidVersion(f"a piece of {manifest.tensors[tensor].name!r} has blocks of impossible sizes")
        if any(value >= 2**63 for value in piece.checksum):  # msgpack holds nothing below -2**63
            raise InvalidVersion("a checksum is beyond int64")
    if tensor != len(manifest.tensors) - 1 or end != _elements(manifest, tensor):
        raise InvalidVersion("the pieces do not cover the tensors")


def _raw_sizes(piece: TensorPiece, itemsize: int, base: int | None) -> list[int] | None:
    """Return the sizes that the piece's blocks must have, or None if the piece is impossible. Gaps have no fixed size."""
    if base is None and piece.encoding != WHOLE:
        return None
    if (piece.encoding == SAME) != (piece.changed == 0) and piece.encoding != WHOLE:
        return None
    match piece.encoding:
        case "same":
            return []
        case "whole":
            return [piece.count * itemsize] if piece.changed == piece.count else None
        case "dense":
            return [piece.count] * itemsize
        case "bitmap":
            return [-(-piece.count // 8), *[piece.changed] * itemsize]
        case "gaps":
            raw = piece.blocks[0].raw if piece.blocks else -1
            possible = piece.changed <= raw <= piece.changed + piece.count // 255
            return [raw, *[piece.changed] * itemsize] if possible else None
    return None


def _check_places(manifest: VersionManifest) -> None:
    ends = [0] * len(manifest.parts)
    for piece in sorted(manifest.pieces, key=lambda piece: (piece.part, piece.offset)):
        if not piece.blocks:
            continue
        if not 0 <= piece.part < len(ends) or piece.offset < ends[piece.part]:
            raise InvalidVersion("two pieces overlap, or one is in a part that does not exist")
        for block in piece.blocks:
            if (
                not 0 <= block.stored <= block.raw
                or (block.stored != block.raw and not block.compressed)
                or (block.compressed and piece.encoding == WHOLE)
            ):
                raise InvalidVersion("a block is stored in an impossible number of bytes")
        ends[piece.part] = piece.offset + sum(block.stored for block in piece.blocks)
    for part, end in zip(manifest.parts, ends, strict=True):
        if end > part.nbytes or not part.name.replace(".", "").isalnum() or ".." in part.name:
            raise InvalidVersion(f"part {part.name!r} cannot hold its pieces")


def _elements(manifest: VersionManifest, tensor: int) -> int:
    return math.prod(manifest.tensors[tensor].shape) if tensor >= 0 else 0


def _itemsize(meta: TensorMeta) -> int:
    return getattr(torch, meta.dtype).itemsize
