"""The packing of the row that a model's layers are computing."""

from __future__ import annotations

from dataclasses import dataclass

from services.trainer.model.attention.packing import Packing


@dataclass
class CurrentRow:
    """The row of the last forward pass, for layers that pass no extra arguments to attention (those of Nemotron and StableLM, and
    compiled ones). It is kept until the next forward pass, because the backward pass of a row needs it, too.
    """

    packing: Packing | None = None


row = CurrentRow()
