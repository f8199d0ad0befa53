"""Text and tables for people. On a terminal rich draws them. Elsewhere they are plain text, for which rich is not imported: that
takes as long as many commands.

Guarantees: no text is read as markup; plain text has no colours, is not cut off and not wrapped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from services.console.printable import columns, printable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text


class Styled:
    """Text with rich's styles. `look`: further arguments of rich's `Text`."""

    def __init__(self, text: str = "", style: str = "", **look: Any) -> None:
        self._spans, self._look = [(text, style)], look

    def __add__(self, other: Styled) -> Styled:
        joined = Styled(**self._look)
        joined._spans = [*self._spans, *other._spans]
        return joined

    def __str__(self) -> str:
        return "".join(text for text, _ in self._spans)

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text.assemble(*self._spans, **self._look)


def cell(text: object, style: str = "", keep_lines: bool = False) -> Styled:
    """Return untrusted text, made printable."""
    return Styled(printable(text, keep_lines), style)


class Grid:
    """A table. Its arguments, and those of `column`, are those of rich's `Table` and `add_column`."""

    def __init__(self, title: str = "", **look: Any) -> None:
        self.rows: list[Sequence[str | Styled]] = []
        self._title, self._look = title, look
        self._columns: list[tuple[str, dict[str, Any]]] = []
        self._sections: set[int] = set()

    def column(self, name: str = "", **look: Any) -> None:
        """Add a column."""
        self._columns.append((name, look))

    def row(self, *cells: str | Styled) -> None:
        """Add a row."""
        self.rows.append(cells)

    def section(self) -> None:
        """Draw a line below the last row, if there are lines."""
        self._sections.add(len(self.rows) - 1)

    def __str__(self) -> str:
        names = [[name for name, _ in self._columns]] if self._look.get("show_header", True) else []
        right = [i for i, (_, look) in enumerate(self._columns) if look.get("justify") == "right"]
        rows = [[*cells, *[""] * (len(self._columns) - len(cells))] for cells in (*names, *self.rows)]
        table = columns(rows, right) if rows else ""
        return f"{self._title}\n{table}" if self._title else table

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self._title, "table.title") if self._title else None, title_justify="left", **self._look)
        for name, look in self._columns:
            table.add_column(name, **look)
        for i, cells in enumerate(self.rows):
            table.add_row(*(Text(each) if isinstance(each, str) else each for each in cells), end_section=i in self._sections)
        return table


def facts_grid(rows: Sequence[tuple[str, str | Styled]], style: str = "dim") -> Grid:
    """Return names, which have a style, with their values, one per line."""
    grid = Grid(box=None, padding=(0, 2), collapse_padding=True, show_header=False, show_edge=False, pad_edge=False)
    grid.column(style=style, no_wrap=True)
    grid.column(overflow="fold")
    for name, value in rows:
        grid.row(name, value)
    return grid


class Framed:
    """Text in a frame with a title."""

    def __init__(self, title: Styled, text: Styled) -> None:
        self._title, self._text = title, text

    def __str__(self) -> str:
        return f"{self._title}\n{self._text}"

    def __rich__(self) -> Panel:
        from rich.panel import Panel

        return Panel(self._text, title=self._title.__rich__(), title_align="left", border_style="dim")


class Stacked:
    """Parts, one below the other."""

    def __init__(self, *parts: Shown) -> None:
        self._parts = parts

    def __str__(self) -> str:
        return "\n".join(map(str, self._parts))

    def __rich__(self) -> Group:
        from rich.console import Group

        return Group(*self._parts)


Shown = Styled | Grid | Framed | Stacked


def show(*parts: Shown, **look: Any) -> None:
    """Print parts, drawn by rich on a terminal or where COLUMNS says how wide one is. `look`: arguments of its `print`."""
    if not (sys.stdout.isatty() or "COLUMNS" in os.environ):
        for part in parts:
            print(part)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, **look)
