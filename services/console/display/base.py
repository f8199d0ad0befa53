"""The interface between the launcher and what shows a run to a person: a screen (screen.py) or lines (plain.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.operations.observe import Poll


class Display(Protocol):
    """Shows the run to a person."""

    def event(self, text: str) -> None:
        """Show an event."""
        ...

    def loading(self, text: str) -> None:
        """Show how far services are loaded."""
        ...

    def steps(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Show newly recorded steps."""
        ...

    def draw(self, poll: Poll, waiting: Mapping[str, float]) -> None:
        """Show the latest observation. `waiting`: seconds until each dead child is restarted."""
        ...
