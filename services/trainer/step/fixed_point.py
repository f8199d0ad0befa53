"""Sums of gradients that do not depend on their order: over micro-batches and over ranks.

Guarantees: `reduce` leaves the same bits on every rank, whichever rank held which micro-batch, because integers add up without
rounding. A gradient element loses what is below 2^-53, far below AdamW's epsilon of 1e-8, and must be below 2^11 divided by the
number of micro-batches; anything else is reported as infinite.
Cost: 8 bytes per parameter, a pass over the gradients per micro-batch (on a CPU ten times a plain sum, 3 ns per parameter), an
all-reduce of twice the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from services.trainer import ranks

FRACTION_BITS = 52
"""An int64 then holds sums up to 2^11 in steps of 2^-52. AdamW with epsilon 1e-8 moves a weight by less than a ten-millionth of
the learning rate for a gradient of 2^-52.
"""

PIECE = 1 << 18
"""Elements converted at a time: bounds the memory of the conversion."""


class FixedPointSum:
    """Sums the gradients of `parameters`, which autograd leaves in `.grad`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums = [torch.zeros_like(parameter, dtype=torch.int64) for parameter in self._parameters]
        self._largest = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients of a micro-batch and clear them."""
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if parameter.grad is not None:
                pieces = zip(parameter.grad.reshape(-1).split(PIECE), total.view(-1).split(PIECE), strict=True)
                for gradient, piece in pieces:
                    self._largest = torch.maximum(self._largest, gradient.abs().max().double().nan_to_num(nan=torch.inf))
                    piece += gradient.double().mul_(2.0**FRACTION_BITS).round_().to(torch.int64)
                parameter.grad = None

    @torch.no_grad()
    def reduce(self, micro_batches: int) -> None:
        """Put the sum over all ranks into `.grad` and reset. Collective.

        `micro_batches` is the number over all ranks. If an element was too large or NaN, gradients are infinite.
        """
        too_large = float(ranks.maximum(self._largest)) >= 2.0 ** (63 - FRACTION_BITS) / micro_batches
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            summed = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            for piece, into in zip(ranks.total(total).view(-1).split(PIECE), summed.view(-1).split(PIECE), strict=True):
                into.copy_(piece.double().mul_(2.0**-FRACTION_BITS))
            parameter.grad = summed.fill_(math.inf) if too_large else summed
            total.zero_()
        self._largest.zero_()
