"""Text and tables for people, drawn by rich.

Guarantees: no text is read as markup; output that is no terminal has no colours, is not cut off and not wrapped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from services.console.printable import printable

UNLIMITED = 100_000  # columns of an output that is no terminal


def cell(text: object, style: str = "", keep_lines: bool = False) -> Text:
    """Return untrusted text, made printable."""
    return Text(printable(text, keep_lines), style)


def table(*columns: str, right: Iterable[str] = (), titles: bool = True) -> Table:
    """Return a table without lines. `right`: the columns with numbers. `titles`: whether the columns' names are shown."""
    numbers = {*right}
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=titles, header_style="dim")
    for name in columns:
        drawn.add_column(name, justify="right" if name in numbers else "left", overflow="fold", no_wrap=name in numbers)
    return drawn


def facts(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Return names with their values, one a line."""
    drawn = table("name", "value", titles=False)
    for name, value in rows:
        drawn.add_row(Text(name, "dim"), value)
    return drawn


def show(*parts: RenderableType) -> None:
    """Print parts one below the other, as wide as the terminal or COLUMNS, or without a limit."""
    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, markup=False, emoji=False, width=None if terminal else UNLIMITED)
    with console.capture() as drawn:
        for part in parts:
            console.print(part, soft_wrap=not terminal)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()), flush=True)
