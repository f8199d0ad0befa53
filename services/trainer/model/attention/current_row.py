"""The packing of the row that a model's layers are computing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.trainer.model.attention.packing import Packing

PLAN_ROWS = 16
"""Rows of a shape that are trained without a plan for it: together they lose about the time that a plan takes, 0.3 s on an H200
for 0.02 s a row of 16k tokens (docs/log.md, 2026-11-27).
"""

SHAPES = 1000
"""Shapes that are counted. Most are never seen again."""


class CurrentRow:
    """The row of the last forward pass, for layers that pass no extra arguments to attention (those of Nemotron and StableLM, and
    compiled ones). It is kept until the next forward pass, because the backward pass of a row needs it, too.

    Attributes: `packing`; `recurs`, whether its batches have a shape that many rows had, so that planning kernels for it pays;
    `planned`, whether kernels are planned whatever that gains; `flex`, whether FlexAttention computes it on a GPU
    (`trainer.attention`).
    """

    def __init__(self) -> None:
        self.packing: Packing | None = None
        self.recurs = self.planned = self.flex = False
        self._seen = Counter[tuple[tuple[int, int], ...]]()

    def begin(self, packing: Packing) -> None:
        """Begin the forward pass of a row."""
        self.packing, shapes = packing, packing.shapes
        if packing.owned.is_cuda and torch.is_grad_enabled():  # where it is planned for, and trained
            if len(self._seen) >= SHAPES:
                self._seen = Counter({shape: count for shape, count in self._seen.items() if count > PLAN_ROWS})
            self._seen[shapes] += 1
        self.recurs = self._seen[shapes] > PLAN_ROWS

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Plan kernels for the rows inside the block."""
        self.planned = True
        try:
            yield
        finally:
            self.planned = False


row = CurrentRow()
