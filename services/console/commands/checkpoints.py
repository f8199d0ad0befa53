"""Implements `grpo checkpoints`, which lists the checkpoints in a run's folder."""

from __future__ import annotations

import time

from services.console.display.layout import Grid, cell, show
from services.console.errors import EXIT_FAILED, EXIT_OK
from services.console.paths import existing
from services.console.printable import print_json, printable
from services.operations.inspection.checkpoints import CheckpointEntry, CheckpointList, inspect_checkpoints

MEBIBYTE = 2**20


def checkpoints(run: str, as_json: bool, verify: bool) -> int:
    """List a run's checkpoints, from its folder. Return exit code 1 when a complete one cannot be loaded."""
    folder = existing(run)
    steps, every_steps, keep = folder.keys("run.steps", "checkpoint.every_steps", "checkpoint.keep")
    found = inspect_checkpoints(folder.checkpoints, steps, every_steps, keep, verify)
    if as_json:
        print_json(found)
    elif found.checkpoints:
        show(_table(found, verify))
    else:
        print(f"no checkpoints in {printable(found.folder)}; the trainer writes one every {every_steps} steps")
    return EXIT_FAILED if any(one.complete and one.problem for one in found.checkpoints) else EXIT_OK


def _table(found: CheckpointList, verified: bool) -> Grid:
    table = Grid(f"checkpoints in {found.folder} (checkpoint.keep = {found.keep})")
    for name in ("step", "MiB", "ranks", "ZeRO"):
        table.column(name, justify="right")
    for name in ("written", "kept until step", "state"):
        table.column(name)
    for one in found.checkpoints:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.written_s)) if one.written_s else ""
        until = "" if not one.complete else "the end" if one.kept_until is None else str(one.kept_until)
        numbers = (str(one.ranks), str(one.zero_stage)) if one.complete else ("", "")
        table.row(str(one.step), f"{one.bytes / MEBIBYTE:,.1f}", *numbers, written, until, cell(_state(one, verified)))
    return table


def _state(one: CheckpointEntry, verified: bool) -> str:
    if one.problem:
        return one.problem
    return ("latest, " if one.latest else "") + ("every byte verified" if verified else "complete")
