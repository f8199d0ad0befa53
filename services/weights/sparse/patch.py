"""A patch: the bits that changed since a version, the old ones and the new, as they travel.

A table comes first, [1 + rows, 8] int64, then the data of its rows, in chunks that both sides derive from the table. A row is a
run of elements of one tensor: where they changed, what was there, and what is there now.
Guarantees: a table that `decode` returns is consistent: rows lie inside their tensors, none overlap, and no size exceeds what its
elements can need, so a receiver may allocate what it says; table and data have checksums, made where the weights are. Nothing
here copies between device and host but the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from services.weights.checksums import WeightChanged, checksums
from services.weights.collective import WeightManifest
from services.weights.sparse.changes import decode_gaps, encode_gaps
from services.weights.versions.broadcast import MANIFEST_BYTES, Heading
from services.weights.versions.positions import InvalidVersion

CHUNK_BYTES = 64 << 20
"""Data that is in flight at once. A receiver keeps of each chunk only what concerns its own part of the model."""

TABLE = "the list of changes"
"""What `WeightChanged` names if the table itself arrived changed."""

_FORMAT = 1
_COLUMNS = 8
_ALIGNMENT = 8


class PatchRow(NamedTuple):
    """A run of elements of one flattened tensor."""

    tensor: int  # index among the manifest's tensors
    start: int  # first element
    count: int
    changed: int  # elements whose bits differ from the base
    gaps_nbytes: int
    part: int  # rank of the trainer that has the data
    checksum: tuple[int, int]  # of the data

    def nbytes(self, itemsize: int) -> int:
        """Return the length of its data, whose elements have `itemsize` bytes."""
        return _padded(self.gaps_nbytes) + 2 * _padded(self.changed * itemsize)


@dataclass(frozen=True)
class Patch:
    """A table."""

    base: int  # the version, of the same trainer, that it changes
    rows: list[PatchRow]
    sizes: list[int]  # of the rows' data, bytes

    @property
    def nbytes(self) -> int:
        """Return the bytes of the data."""
        return sum(self.sizes)

    @property
    def changed(self) -> int:
        """Return the number of changed elements."""
        return sum(row.changed for row in self.rows)

    def heading(self, fence: int, version: int) -> Heading:
        """Return what precedes it."""
        return Heading(fence, version, 8 * _COLUMNS * (1 + len(self.rows)), self.nbytes)

    def encoded(self, fence: int, version: int) -> torch.Tensor:
        """Return the table as [nbytes] uint8."""
        rows = [[*row[:6], *row.checksum] for row in self.rows]
        table = torch.tensor([[fence, version, self.base, len(rows), self.nbytes, _FORMAT, 0, 0], *rows])
        table[0, 6:] = checksums([table])[0]
        return table.view(-1).view(torch.uint8)

    def chunks(self) -> Iterator[tuple[range, int]]:
        """Yield the rows that travel together, as a range, and the bytes of their data: never those of two ranks."""
        first, size = 0, 0
        for i, (row, nbytes) in enumerate(zip(self.rows, self.sizes, strict=True)):
            if size and (row.part != self.rows[first].part or size + nbytes > CHUNK_BYTES):
                yield range(first, i), size
                first, size = i, 0
            size += nbytes
        if size:
            yield range(first, len(self.rows)), size


def assemble(base: int, rows: Sequence[PatchRow], manifest: WeightManifest) -> Patch:
    """Return the patch of `rows`, which are in the order of their data."""
    return Patch(base, list(rows), [row.nbytes(_itemsizes(manifest)[row.tensor]) for row in rows])


def encode_row(
    tensor: int, start: int, count: int, part: int, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor
) -> tuple[PatchRow, torch.Tensor]:
    """Return a row without its checksum, and its data, [nbytes] uint8. `old` and `new`: bits at `positions`, [changed]."""
    gaps = encode_gaps(positions)
    data = torch.cat([block for piece in (gaps, old, new) for block in _blocks(piece.view(torch.uint8))])
    return PatchRow(tensor, start, count, positions.numel(), gaps.numel(), part, (0, 0)), data


def with_checksums(rows: Sequence[PatchRow], data: Sequence[torch.Tensor]) -> list[PatchRow]:
    """Return `rows` with the checksums of their data."""
    return [row._replace(checksum=(first, second)) for row, (first, second) in zip(rows, checksums(data).tolist(), strict=True)]


def decode(table: torch.Tensor, heading: Heading, manifest: WeightManifest) -> Patch:
    """Return the patch that `table`, [nbytes] uint8 in host memory, describes.

    Raises `InvalidVersion`, and `WeightChanged` if it arrived changed.
    """
    if not table.numel() or table.numel() % (8 * _COLUMNS) or table.numel() > MANIFEST_BYTES:
        raise InvalidVersion(f"a list of changes of {table.numel()} bytes is impossible")
    numbers = table.view(torch.int64).view(-1, _COLUMNS)
    claimed, numbers = numbers[0, 6:].clone(), numbers.clone()
    numbers[0, 6:] = 0
    if not torch.equal(checksums([numbers])[0], claimed):
        raise WeightChanged(TABLE)
    (fence, version, base, count, nbytes, form, _, _), *listed = numbers.tolist()
    if (fence, version, count, form) != (heading.fence, heading.version, len(listed), _FORMAT):
        raise InvalidVersion(f"a patch for version {heading.version} describes version {version} of trainer {fence}")
    rows = [PatchRow(row[0], row[1], row[2], row[3], row[4], row[5], (row[6], row[7])) for row in listed]
    _check(rows, manifest)
    patch = assemble(base, rows, manifest)
    if not patch.nbytes == nbytes == heading.data_nbytes:
        raise InvalidVersion(f"a patch of {patch.nbytes} bytes announces {heading.data_nbytes}")
    return patch


def decode_row(row: PatchRow, data: torch.Tensor, itemsize: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where the flattened tensor changes, [changed] int64, and the old and new bytes there, [changed * itemsize] uint8.

    Raises `InvalidVersion`.
    """
    size = row.changed * itemsize
    first = _padded(row.gaps_nbytes)
    second = first + _padded(size)
    positions = decode_gaps(data[: row.gaps_nbytes], row.changed, row.count) + row.start
    return positions, data[first : first + size], data[second : second + size]


def _check(rows: Sequence[PatchRow], manifest: WeightManifest) -> None:
    """Raise `InvalidVersion` if a row is impossible, or overlaps another."""
    lengths = [meta.nbytes // size for meta, size in zip(manifest.tensors, _itemsizes(manifest), strict=True)]
    before = PatchRow(-1, 0, 0, 0, 0, 0, (0, 0))
    for row in sorted(rows):
        inside = 0 <= row.tensor < len(lengths) and row.start >= 0 and row.start + row.count <= lengths[row.tensor]
        sized = 1 <= row.changed <= row.count and row.changed <= row.gaps_nbytes <= row.changed + row.count // 255
        if not inside or not sized or row.part < 0:
            raise InvalidVersion(f"a change of {row.changed} elements from {row.start} of tensor {row.tensor} is impossible")
        if row.tensor == before.tensor and row.start < before.start + before.count:
            raise InvalidVersion(f"changes of tensor {row.tensor} overlap at {row.start}")
        before = row


def _itemsizes(manifest: WeightManifest) -> list[int]:
    return [getattr(torch, meta.dtype).itemsize for meta in manifest.tensors]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _blocks(data: torch.Tensor) -> list[torch.Tensor]:
    """Return `data`, uint8, and zeros up to the next multiple of the alignment."""
    return [data, data.new_zeros(_padded(data.numel()) - data.numel())]
