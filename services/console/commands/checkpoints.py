"""Implements `grpo checkpoint`, `grpo restore` and `grpo checkpoints`. Each verb returns the exit code."""

from __future__ import annotations

import asyncio
import getpass
import time

from rich.table import Table

from services.config import load_resolved
from services.console.attach import Attached, attach, existing_folder
from services.console.commands.verbs import existing, later
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.inspect.verbs import console
from services.console.printable import cell, safe_json
from services.operations.inspection.checkpoints import (
    CheckpointEntry,
    CheckpointList,
    inspect_checkpoints,
    request_checkpoint_of,
    request_restore_to,
)
from services.protocol.errors import NotFound

POLL_S = 0.5
MEBIBYTE = 2**20


async def checkpoint(run: str, redis_url: str, why: str, wait: bool) -> int:
    """Request a checkpoint; with `wait`, wait until it is written. Return exit code 1 when it cannot be written."""
    async with attach(run, redis_url) as attached:
        before = (await existing(attached)).checkpoint_failed
        try:
            asked = await request_checkpoint_of(attached.store, why or f"{getpass.getuser()}, grpo checkpoint")
        except NotFound as error:
            raise ConsoleError(f"run {attached.name}: {error}", EXIT_CONFIG) from None
        step = asked.step
        if wait and not asked.saved:
            if not attached.live:
                raise ConsoleError(
                    f"run {attached.name} is not running: its trainer will write the checkpoint when the run resumes", EXIT_CONFIG
                )
            step = await _written(attached, asked.step, before)
    if wait or asked.saved:
        print(f"run {attached.name}: checkpoint of step {step} written")
    else:
        print(f"run {attached.name}: checkpoint requested, of step {step} or the step in training{later(attached)}")
    return EXIT_OK


async def restore(step: int, run: str, redis_url: str) -> int:
    """Restore a run to a checkpoint; a run that is stopped does so when it resumes."""
    root = existing_folder(run).checkpoints
    async with attach(run, redis_url) as attached:
        try:
            await request_restore_to(attached.store, root, step)
        except NotFound as error:
            raise ConsoleError(f"run {attached.name}: {error}", EXIT_CONFIG) from None
        print(f"run {attached.name}: restore to step {step} requested{later(attached)}")
    return EXIT_OK


def checkpoints(run: str, as_json: bool, verify: bool) -> int:
    """List a run's checkpoints, from its folder. Return exit code 1 when a complete one cannot be loaded."""
    folder = existing_folder(run)
    found = inspect_checkpoints(load_resolved(folder.config), folder.checkpoints, verify)
    if as_json:
        print(safe_json(found.model_dump_json(indent=2)))
    else:
        console().print(_table(found, verify))
    return EXIT_FAILED if any(one.complete and one.problem for one in found.checkpoints) else EXIT_OK


async def _written(attached: Attached, step: int, failed_before: str) -> int:
    """Wait for a checkpoint of `step` or later, and return its step."""
    while True:
        state = await existing(attached)
        if state.checkpointed_step >= step:
            return state.checkpointed_step
        if state.checkpoint_failed not in ("", failed_before):
            raise ConsoleError(f"run {attached.name}: {state.checkpoint_failed}", EXIT_FAILED)
        await asyncio.sleep(POLL_S)


def _table(found: CheckpointList, verified: bool) -> Table:
    table = Table(title=f"checkpoints in {found.folder} (checkpoint.keep = {found.keep})", title_justify="left")
    for name in ("step", "MiB", "ranks", "ZeRO"):
        table.add_column(name, justify="right")
    for name in ("written", "kept until step", "state"):
        table.add_column(name)
    for one in found.checkpoints:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.written_s)) if one.written_s else ""
        until = "" if not one.complete else "the end" if one.kept_until is None else str(one.kept_until)
        numbers = (str(one.ranks), str(one.zero_stage)) if one.complete else ("", "")
        table.add_row(str(one.step), f"{one.bytes / MEBIBYTE:,.1f}", *numbers, written, until, cell(_state(one, verified)))
    return table


def _state(one: CheckpointEntry, verified: bool) -> str:
    if one.problem:
        return one.problem
    return ("latest, " if one.latest else "") + ("every byte verified" if verified else "complete")
