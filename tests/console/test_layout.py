"""Text and tables for people: formatted by rich on a terminal, plain elsewhere."""

from __future__ import annotations

import pytest
from rich.console import Console

from services.console.display.layout import Framed, Grid, Shown, Stacked, Styled, cell, facts_grid, show


def _table() -> Grid:
    table = Grid("pods of [run]")
    table.column("pod", header_style="dim")
    table.column("tok/s", justify="right")
    table.row(cell("trainer\x1b[2J"), "9")
    table.section()
    table.row(Styled("generator-0", "bold") + Styled(", waiting", "yellow"), "1,200")
    table.row("generator-1")
    return table


PLAIN = """\
pods of [run]
pod                   tok/s
trainer\\e[2J              9
generator-0, waiting  1,200
generator-1"""

DRAWN = """\
pods of [run]
┏━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━┓
┃ pod                  ┃ tok/s ┃
┡━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━┩
│ trainer\\e[2J         │     9 │
├──────────────────────┼───────┤
│ generator-0, waiting │ 1,200 │
│ generator-1          │       │
└──────────────────────┴───────┘"""


def _drawn(part: Shown) -> list[str]:
    with (console := Console(width=60, highlight=False)).capture() as shown:
        console.print(part)
    return [line.rstrip() for line in shown.get().splitlines()]


def test_a_table_is_plain_or_drawn() -> None:
    assert str(_table()) == PLAIN
    assert _drawn(_table()) == DRAWN.splitlines()


def test_parts_are_stacked() -> None:
    facts = facts_grid([("version", "3"), ("sent", cell("4 B", "red"))])
    parts = Stacked(facts, Styled(), Framed(cell("0: [b]"), Styled("4\n2")))
    assert str(parts) == "version  3\nsent     4 B\n\n0: [b]\n4\n2"
    top = f"╭─ 0: [b] {'─' * 49}╮"
    assert _drawn(parts) == ["version  3", "sent     4 B", "", top, *(f"│ {each:57}│" for each in "42"), f"╰{'─' * 58}╯"]


def test_text_is_wrapped_if_the_width_is_known(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show(Styled("a text that is longer than a line", "bold"), Styled("another"))
    assert capsys.readouterr().out == "a text that is longer than a line\nanother\n"
    show()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("COLUMNS", "20")
    show(Styled("a text that is longer than a line", "bold"), Styled("another"))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == ["a text that is", "longer than a line", "another"]
