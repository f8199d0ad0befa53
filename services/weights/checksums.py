"""Checksums of tensors: two int64 numbers per tensor, computed on the tensor's device, the same on every device.

Guarantees: a single changed bit, byte or element always changes the checksum; elements that are swapped, shifted or from another
version change it except with a probability of about 2^-64. Changes that keep every row and column sum (see below) go undetected;
that takes four changes that cancel each other, so this does not protect against deliberate tampering. The sums are integers
modulo 2^64, so neither the order of summation nor the number of threads matters. A tensor is copied only if its elements are not
contiguous or not aligned to 8 bytes.

The bytes are read as int64 words in rows of `_WORDS`. The sums of every row and every column run at memory speed. Each of these
few sums is then mixed with its position by the bijection of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014); the mixed sums of rows and of columns are the two numbers. Small tensors cost calls rather than bytes,
so those of a bucket are mixed together.
Imports torch; of `runtime` only this module and `collective` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

_WORDS = 256  # a row of 2 KiB; fewer make more sums to mix, more are slower to sum by column
_PIECE = 512  # rows, 1 MiB: on a CPU they are summed by row and by column while they are in its L2 cache
_GAMMA, _FIRST, _SECOND = (constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class WeightChanged(RuntimeError):
    """A received tensor differs from the one sent."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"the weights of {tensor} differ from those that were sent")
        self.tensor = tensor


@torch.no_grad()
def checksums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the checksums of `tensors`, [tensors, 2] int64, on their device.

    A checksum covers the tensor's bytes in row-major order; an empty tensor has zeros.
    """
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        sums += _sums(tensor)
    if not sums:
        return torch.zeros(0, 2, dtype=torch.int64)
    lengths = torch.tensor([part.numel() for part in sums])
    ends = lengths.cumsum(0)
    firsts = (ends - lengths)[::2]  # where the sums of each tensor begin: its rows, then its columns
    joined = torch.cat(sums)
    places = torch.arange(1, joined.numel() + 1) - firsts.repeat_interleave(lengths[::2] + lengths[1::2])
    mixed = _mixed(joined, places.to(joined.device))
    so_far = torch.cat([mixed.new_zeros(1), mixed.cumsum(0)])[ends]  # modulo 2^64, as is its difference
    return so_far.diff(prepend=so_far.new_zeros(1)).view(-1, 2)


def check(names: Sequence[str], held: Sequence[torch.Tensor], sent: torch.Tensor) -> None:
    """Raise `WeightChanged` for the first tensor whose checksum differs between `held`, in one part per bucket, and `sent`,
    [len(names), 2] int64.
    """
    if held:
        differ = (torch.cat(list(held)) != sent).any(1).tolist()
        if True in differ:
            raise WeightChanged(names[differ.index(True)])


def _sums(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of every row and of every column, int64."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    full = flat.numel() // (8 * _WORDS) * (8 * _WORDS)
    rows: list[torch.Tensor] = []
    columns = torch.zeros(_WORDS if full else 0, dtype=torch.int64, device=tensor.device)
    if full:
        words = flat[:full].view(torch.int64).view(-1, _WORDS)
        if words.device.type == "cpu" and torch.get_num_threads() > 1:
            rows.append(_sum_alone(words, columns))
        else:
            for piece in words.split(_PIECE) if words.device.type == "cpu" else (words,):
                rows.append(piece.sum(1))
                columns += piece.sum(0)
    if rest := flat.numel() - full:
        padded = torch.zeros(-(-rest // 8) * 8, dtype=torch.uint8, device=tensor.device)
        padded[:rest] = flat[full:]
        row = padded.view(torch.int64)
        rows.append(row.sum(0, keepdim=True))
        if full:
            columns[: row.numel()] += row
        else:
            columns = row
    if not rows:  # an empty tensor
        return columns, columns
    return rows[0] if len(rows) == 1 else torch.cat(rows), columns


def _sum_alone(words: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the sums of every row and add those of every column to `columns`, on this thread alone.

    Threads would meet at the end of every piece; on a machine whose cores are busy that took fifty times as long. One thread of
    torch's own takes 0.7 of numpy's time.
    """
    table, by_column = words.numpy(), columns.numpy()
    by_row = np.empty(len(table), np.int64)
    for start in range(0, len(table), _PIECE):
        piece = table[start : start + _PIECE]
        np.add.reduce(piece, axis=1, out=by_row[start : start + _PIECE])
        by_column += np.add.reduce(piece, axis=0)
    return torch.from_numpy(by_row)


def _mixed(sums: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return `sums`, [n] int64, each mixed with its position."""
    mixed = sums + places * _GAMMA
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
    return mixed ^ _shifted(mixed, 31)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without the sign: torch has no unsigned arithmetic on all devices."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
