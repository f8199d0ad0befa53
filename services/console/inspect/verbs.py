"""Implements `grpo inspect` and `grpo replay`, which read a run directly from its Redis. Each verb returns the exit code."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from services.console.attach import Attached, attach, existing
from services.console.display.layout import show
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.printable import print_json
from services.protocol.errors import NotFound
from services.store.calls.inspection import Sort

if TYPE_CHECKING:  # modules that answer and format take longer to import than the answer: each verb imports its own
    from services.console.commands.control import Target
    from services.operations.inspection.answer import Answer


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
    from services.operations.inspection.buffer import inspect_buffer

    async with _looking(run, redis_url) as attached:
        found = await inspect_buffer(attached.store, sort, offset, limit, reverse)
    _show(found, "buffer_table", as_json)
    return EXIT_OK


async def group(run: str, redis_url: str, ticket: str, offset: int, limit: int, as_json: bool) -> int:
    """Show where a group is and what it contains."""
    from services.operations.inspection.group import inspect_group
    from services.operations.inspection.text import TextReader

    async with _looking(run, redis_url) as attached:
        config = attached.config
        reader = TextReader(config.model.path if config else None)
        found = await inspect_group(attached.store, ticket, reader, config.advantage.kind if config else None, offset, limit)
    _show(found, "group_tables", as_json)
    return EXIT_OK


async def step(run: str, redis_url: str, number: int, offset: int, limit: int, as_json: bool) -> int:
    """Show a step's plan, or its metrics once the plan is deleted."""
    from services.operations.inspection.step import inspect_step

    async with _looking(run, redis_url) as attached:
        row_tokens = attached.config.trainer.row_tokens if attached.config else None
        found = await inspect_step(attached.store, number, row_tokens, offset, limit)
    _show(found, "step_tables", as_json)
    return EXIT_OK


async def sync(run: str, redis_url: str, as_json: bool) -> int:
    """Show weight sync."""
    from services.operations.inspection.sync import inspect_sync

    async with _looking(run, redis_url) as attached:
        found = await inspect_sync(attached.store, attached.ttl_s)
    _show(found, "sync_table", as_json)
    return EXIT_OK


async def ledger(run: str, redis_url: str, as_json: bool) -> int:
    """Show the counts of an audit."""
    from services.console.commands.audit import as_table, counted

    found = await counted(run, redis_url)
    if as_json:
        print_json(found.as_dict())
    else:
        show(as_table(found))
    return EXIT_OK


async def dead_letters(run: str, redis_url: str, limit: int, before: str, as_json: bool) -> int:
    """List dead letters, the newest first."""
    from services.operations.inspection.deadletters import inspect_dead_letters

    async with _looking(run, redis_url) as attached:
        found = await inspect_dead_letters(attached.store, limit, before)
    _show(found, "dead_letters_table", as_json)
    return EXIT_OK


async def dead_letter(run: str, redis_url: str, ids: Sequence[str], as_json: bool) -> int:
    """Show the contents of dead letters; of several, JSON is a list."""
    from services.operations.inspection.deadletters import inspect_dead_letter

    async with _looking(run, redis_url) as attached:
        found = [await inspect_dead_letter(attached.store, id) for id in ids]
    if as_json:
        print_json(found[0] if len(found) == 1 else found)
        return EXIT_OK
    for letter in found:
        _show(letter, "dead_letter_table", as_json)
    return EXIT_OK


async def requeue(target: Target, ids: Sequence[str], everything: bool, reason: str, as_json: bool) -> int:
    """Requeue dead letters. Return exit code 1 when none could be."""
    from services.console.commands.control import requeue as request_requeue

    found, run = await request_requeue(target, ids, everything, reason)
    _show(found, "requeue_table", as_json)
    if not as_json:
        print(f"{run.prefix}{len(found.requeued)} requeued, {len(found.refused)} refused{run.later}")
    return EXIT_FAILED if found.refused and not found.requeued else EXIT_OK


def _show(answer: Answer, table: str, as_json: bool) -> None:
    """Print an answer as JSON, or as rendered by the function `table` of tables.py."""
    if as_json:
        print_json(answer)
        return
    from services.console.inspect import tables

    show(getattr(tables, table)(answer))
