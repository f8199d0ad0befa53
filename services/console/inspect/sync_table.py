"""Formats the answer of `grpo inspect sync` for a terminal."""

from __future__ import annotations

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from services.console.printable import cell
from services.operations.figures import NOTHING
from services.operations.inspection.sync import SyncAnswer, SyncMember


def sync_table(found: SyncAnswer) -> RenderableType:
    """Return the round and what was sent, and one row per generator."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("published", f"version {found.published}" if found.published >= 0 else NOTHING)
    if found.round:
        facts.add_row("last round", f"version {found.version}: {found.round}, attempt {found.attempt}, epoch {found.epoch}")
        facts.add_row("transport", found.backend)
    if found.sent_bytes is not None and found.sent_share is not None and found.changed_share is not None:
        facts.add_row("sent", f"{found.sent_bytes:,} bytes as {found.encoding}, {found.sent_share:.3%} of the weights")
        facts.add_row("changed", f"{found.changed_share:.3%} of the elements")
    table = Table(box=None, padding=(0, 1), show_edge=False)
    table.add_column("generator", header_style="dim")
    for name in ("version", "behind", "bytes", "pause s", "catch-ups"):
        table.add_column(name, header_style="dim", justify="right", no_wrap=True)
    for name in ("phase", "answer"):
        table.add_column(name, header_style="dim")
    for member in found.members:
        table.add_row(*_row(member))
    return Lines(facts, Text(), table)


def _row(member: SyncMember) -> list[str | Text]:
    held = member.version >= 0
    return [
        cell(member.member),
        str(member.version) if held else NOTHING,
        str(member.behind) if held else NOTHING,
        NOTHING if member.bytes is None else f"{member.bytes:,}",
        NOTHING if member.pause_s is None else f"{member.pause_s:.3f}",
        str(member.catch_ups),
        cell(f"{member.phase}, fetching from {member.fetching}" if member.fetching else member.phase),
        cell(member.answered),
    ]
