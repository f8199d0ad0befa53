"""Implements `grpo inspect` and `grpo replay`, which read a run directly from its Redis. Each verb returns the exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence

from rich.console import Console, RenderableType

from services.console.attach import Attached, attach, existing
from services.console.commands.audit import as_table, counted
from services.console.commands.control import Target
from services.console.commands.control import requeue as request_requeue
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.inspect import tables
from services.console.inspect.sync_table import sync_table
from services.console.printable import print_json, safe_json
from services.operations.inspection import Answer, deadletters
from services.operations.inspection.buffer import inspect_buffer
from services.operations.inspection.group import inspect_group
from services.operations.inspection.step import inspect_step
from services.operations.inspection.sync import inspect_sync
from services.operations.inspection.text import TextReader
from services.protocol.errors import NotFound
from services.store.calls.inspection import Sort

PIPE_COLUMNS = 200  # width of output that does not go to a terminal


@contextlib.asynccontextmanager
async def _looking(run: str, redis_url: str) -> AsyncIterator[Attached]:
    """Attach to an existing run, and report anything not found in it as a one-line error."""
    async with attach(run, redis_url) as attached:
        await existing(attached)
        try:
            yield attached
        except NotFound as error:
            raise ConsoleError(f"run {attached.name}: {error}", EXIT_CONFIG) from None


async def buffer(run: str, redis_url: str, sort: Sort, reverse: bool, offset: int, limit: int, as_json: bool) -> int:
    """Show the replay table and a page of its groups."""
    async with _looking(run, redis_url) as attached:
        found = await inspect_buffer(attached.store, sort, offset, limit, reverse)
    _show(found, tables.buffer_table(found), as_json)
    return EXIT_OK


async def group(run: str, redis_url: str, ticket: str, offset: int, limit: int, as_json: bool) -> int:
    """Show where a group is and what it contains."""
    async with _looking(run, redis_url) as attached:
        config = attached.config
        reader = TextReader(config.model.path if config else None)
        found = await inspect_group(attached.store, ticket, reader, config.advantage.kind if config else None, offset, limit)
    _show(found, tables.group_tables(found), as_json)
    return EXIT_OK


async def step(run: str, redis_url: str, number: int, offset: int, limit: int, as_json: bool) -> int:
    """Show a step's plan, or its metrics once the plan is deleted."""
    async with _looking(run, redis_url) as attached:
        row_tokens = attached.config.trainer.row_tokens if attached.config else None
        found = await inspect_step(attached.store, number, row_tokens, offset, limit)
    _show(found, tables.step_tables(found), as_json)
    return EXIT_OK


async def sync(run: str, redis_url: str, as_json: bool) -> int:
    """Show weight sync."""
    async with _looking(run, redis_url) as attached:
        found = await inspect_sync(attached.store, attached.ttl_s)
    _show(found, sync_table(found), as_json)
    return EXIT_OK


async def ledger(run: str, redis_url: str, as_json: bool) -> int:
    """Show the counts of an audit."""
    found = await counted(run, redis_url)
    if as_json:
        print_json(found.as_dict())
    else:
        console().print(as_table(found))
    return EXIT_OK


async def dead_letters(run: str, redis_url: str, limit: int, before: str, as_json: bool) -> int:
    """List dead letters, the newest first."""
    async with _looking(run, redis_url) as attached:
        found = await deadletters.inspect_dead_letters(attached.store, limit, before)
    _show(found, tables.dead_letters_table(found), as_json)
    return EXIT_OK


async def dead_letter(run: str, redis_url: str, id: str, as_json: bool) -> int:
    """Show the contents of a dead letter."""
    async with _looking(run, redis_url) as attached:
        found = await deadletters.inspect_dead_letter(attached.store, id)
    _show(found, tables.dead_letter_table(found), as_json)
    return EXIT_OK


async def requeue(target: Target, ids: Sequence[str], everything: bool, reason: str, as_json: bool) -> int:
    """Requeue dead letters. Return exit code 1 when none could be."""
    found, run = await request_requeue(target, ids, everything, reason)
    if as_json:
        _show(found, "", True)
    else:
        console().print(tables.requeue_table(found))
        print(f"{run.prefix}{len(found.requeued)} requeued, {len(found.refused)} refused{run.later}")
    return EXIT_FAILED if found.refused and not found.requeued else EXIT_OK


def _show(answer: Answer, table: RenderableType, as_json: bool) -> None:
    if as_json:
        print(safe_json(answer.model_dump_json(indent=2)))
    else:
        console().print(table)


def console() -> Console:
    """Return a console for tables, as wide as the terminal or, without one, `PIPE_COLUMNS`."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else PIPE_COLUMNS, highlight=False, markup=False, emoji=False)
