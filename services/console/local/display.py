"""What shows a run to a person: a screen (screen.py) or lines (plain.py). The launcher knows no more of it than this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.operations.observe import Look


class Display(Protocol):
    """What shows the run to a person."""

    def event(self, text: str) -> None:
        """Something happened."""
        ...

    def steps(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Steps were recorded."""
        ...

    def draw(self, look: Look, waiting: Mapping[str, float]) -> None:
        """A look was taken; `waiting`: seconds until a dead child starts again."""
        ...
