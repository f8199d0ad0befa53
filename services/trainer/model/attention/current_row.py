"""The packing of the row that a model's layers are computing."""

from __future__ import annotations

from collections import Counter

from services.trainer.model.attention.packing import Packing

PLAN_ROWS = 16
"""Rows of a shape that are computed without a plan for it: together they lose about the time that a plan takes, 0.3 s on an H200
for 0.02 s a row of 16k tokens (docs/gpu.md).
"""


class CurrentRow:
    """The row of the last forward pass, for layers that pass no extra arguments to attention (those of Nemotron and StableLM, and
    compiled ones). It is kept until the next forward pass, because the backward pass of a row needs it, too.

    Attributes: `packing`; `recurs`, whether its batches have a shape that many rows had, so that planning kernels for it pays;
    `flex`, whether FlexAttention computes it on a GPU (`trainer.attention`).
    """

    def __init__(self) -> None:
        self.packing: Packing | None = None
        self.recurs = False
        self.flex = False
        self._seen = Counter[tuple[tuple[int, int], ...]]()

    def begin(self, packing: Packing) -> None:
        """Begin the forward pass of a row."""
        self.packing = packing
        self._seen[packing.shapes] += 1
        self.recurs = self._seen[packing.shapes] > PLAN_ROWS


row = CurrentRow()
