"""Formats the answer of `grpo inspect sync` for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.console.display.layout import Grid, Shown, Stacked, Styled, cell, facts_grid
from services.operations.figures import NOTHING

if TYPE_CHECKING:
    from services.operations.inspection.sync import SyncAnswer, SyncMember


def sync_table(found: SyncAnswer) -> Shown:
    """Return the round, what was sent, and one row per generator."""
    known = [("published", f"version {found.published}" if found.published >= 0 else NOTHING)]
    if found.round:
        known.append(("last round", f"version {found.version}: {found.round}, attempt {found.attempt}, epoch {found.epoch}"))
        known.append(("transport", found.backend))
    if found.sent_bytes is not None and found.sent_share is not None and found.changed_share is not None:
        known.append(("sent", f"{found.sent_bytes:,} bytes as {found.encoding}, {found.sent_share:.3%} of the weights"))
        known.append(("changed", f"{found.changed_share:.3%} of the elements"))
    table = Grid(box=None, padding=(0, 1), show_edge=False)
    table.column("generator", header_style="dim")
    for name in ("version", "behind", "bytes", "pause s", "catch-ups"):
        table.column(name, header_style="dim", justify="right", no_wrap=True)
    for name in ("phase", "answer"):
        table.column(name, header_style="dim")
    for member in found.members:
        table.row(*_row(member))
    return Stacked(facts_grid(known, style=""), Styled(), table)


def _row(member: SyncMember) -> list[str | Styled]:
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
