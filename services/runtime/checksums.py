"""Checksums of tensors: two int64 numbers each, made where the tensor lies, the same on every device.

Guarantees: a single changed bit, byte or element always changes the checksum; elements that are swapped, shifted or of another
version change it but for a chance of about 2^-64. Unseen goes what leaves the sum of every row and of every column as it was (see
below), which takes four changes that cancel each other: nothing here resists somebody who means it. The sums are integers
modulo 2^64, so neither the order of summation nor the number of threads matters.
No copy of a tensor is made, but of one whose elements do not lie end to end or not at a multiple of 8 bytes.

The bytes are read as int64 words in rows of `_WORDS`. Sums over every row and every column are taken, which is as fast as memory;
each of these few sums is then mixed with its place by the bijection of splitmix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014), and the mixed sums of rows and of columns are the two numbers.
Imports torch; of `runtime` only this module and `collective` do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_WORDS = 256  # a row of 2 KiB; fewer make more sums to mix, more are slower to sum by column
_PIECE = 512  # rows, 1 MiB: on a processor summed by row and by column while they lie in its second cache
_GAMMA, _FIRST, _SECOND = (constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Changed(RuntimeError):
    """A tensor is not what was sent."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"the weights of {tensor} are not those that were sent")
        self.tensor = tensor


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """[2] int64 on the tensor's device, of the tensor's bytes in row-major order; of an empty tensor zeros."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() == 0:
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    full = flat.numel() // (8 * _WORDS) * (8 * _WORDS)
    sums = []
    if full:
        words = flat[:full].view(torch.int64).view(-1, _WORDS)
        pieces = words.split(_PIECE) if words.device.type == "cpu" else (words,)
        both = [(piece.sum(1), piece.sum(0)) for piece in pieces]
        sums.append((torch.cat([rows for rows, _ in both]), torch.stack([columns for _, columns in both]).sum(0)))
    if rest := flat[full:].numel():
        padded = torch.zeros(-(-rest // 8) * 8, dtype=torch.uint8, device=tensor.device)
        padded[:rest] = flat[full:]
        row = padded.view(torch.int64)
        sums.append((row.sum(0, keepdim=True), row))
    rows = torch.cat([row for row, _ in sums])
    columns = sums[0][1]
    if len(sums) > 1:
        columns[: sums[1][1].numel()] += sums[1][1]
    mixed = _mixed(torch.cat([rows, columns]))  # in one go: of small tensors the calls cost more than the bytes
    return torch.stack([mixed[: rows.numel()].sum(), mixed[rows.numel() :].sum()])


def check(names: Sequence[str], held: Sequence[torch.Tensor], sent: torch.Tensor) -> None:
    """Raise `Changed` for the first tensor whose checksum, [2] int64, is not the one in `sent`, [len(names), 2] int64."""
    if held:
        differ = (torch.stack(list(held)) != sent).any(1).tolist()
        if True in differ:
            raise Changed(names[differ.index(True)])


def _mixed(sums: torch.Tensor) -> torch.Tensor:
    """`sums`, [n] int64, each mixed with its place."""
    mixed = sums + torch.arange(1, sums.numel() + 1, device=sums.device) * _GAMMA
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
    return mixed ^ _shifted(mixed, 31)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted to the right without the sign: torch has no unsigned arithmetic on all devices."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
