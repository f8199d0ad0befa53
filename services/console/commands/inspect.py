"""The commands `grpo inspect …` and `grpo audit`, which read a run directly from its Redis."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import typer

from services.console.commands.attach import Attached, attach, existing, folder_instead
from services.console.commands.steer import run_and_ids
from services.console.display.answers import answer, audit_table
from services.console.display.text import show
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.options import Json, Limit, Offset, RedisUrl, Reverse, Run
from services.console.printable import print_json
from services.operations.inspection.answer import Answer
from services.operations.inspection.buffer import inspect_buffer
from services.operations.inspection.deadletters import inspect_dead_letter, inspect_dead_letters
from services.operations.inspection.group import inspect_group
from services.operations.inspection.ledger import AuditReport, audit_of_end
from services.operations.inspection.ledger import audit as audited
from services.operations.inspection.step import inspect_step
from services.operations.inspection.sync import inspect_sync
from services.operations.inspection.text import TextReader
from services.protocol.errors import NotFound
from services.store.inspection import Sort


async def audit(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Account for every ticket of a run.

    The run may be running, stopped or finished. Exit code 1: a ticket was lost or duplicated, or slots leaked.
    """
    return EXIT_OK if (await _account(run, redis_url, as_json)).ok else EXIT_FAILED


async def ledger(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Show where all tickets are and how they ended, counted at one instant. `grpo audit` also checks the counts."""
    await _account(run, redis_url, as_json)
    return EXIT_OK


async def buffer(
    run: Run = "",
    redis_url: RedisUrl = "",
    sort: Annotated[Sort, typer.Option(help="Sort by order of issue, oldest policy version or weight.")] = "order",
    reverse: Reverse = False,
    limit: Limit = 20,
    offset: Offset = 0,
    as_json: Json = False,
) -> int:
    """Show the replay table: how full it is, how it is sampled, and its groups."""
    async with _looking(run, redis_url) as attached:
        found = await inspect_buffer(attached.store, sort, offset, limit, reverse)
    return _answer(found, as_json)


async def group(
    ticket: Annotated[str, typer.Argument(metavar="TICKET", help="The group's ticket, <epoch>-<row>.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    limit: Annotated[int, typer.Option(min=1, max=64, help="Completions to show.")] = 16,
    offset: Annotated[int, typer.Option(min=0, max=2**31, help="Completions to skip.")] = 0,
    as_json: Json = False,
) -> int:
    """Show one group: where it is or how it ended, its prompt, completions, scores and advantages."""
    async with _looking(run, redis_url) as attached:
        config = attached.config
        reader = TextReader(config.model.path if config else None)
        found = await inspect_group(attached.store, ticket, reader, config.advantage.kind if config else None, offset, limit)
    return _answer(found, as_json)


async def step(
    number: Annotated[int, typer.Argument(metavar="STEP", min=0, max=2**31, help="Number of the step, from 0.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    limit: Limit = 100,
    offset: Offset = 0,
    as_json: Json = False,
) -> int:
    """Show one step: its groups and how they are packed or, once the step is retired, its metrics."""
    async with _looking(run, redis_url) as attached:
        row_tokens = attached.config.trainer.row_tokens if attached.config else None
        found = await inspect_step(attached.store, number, row_tokens, offset, limit)
    return _answer(found, as_json)


async def sync(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Show weight sync: the last round, what the trainer sent, and each generator's version and pauses."""
    async with _looking(run, redis_url) as attached:
        found = await inspect_sync(attached.store, attached.ttl_s)
    return _answer(found, as_json)


async def deadletter(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]... [RUN]", help="Dead letters to show with their bodies; default: list them."),
    ] = None,
    redis_url: RedisUrl = "",
    limit: Limit = 20,
    before: Annotated[str, typer.Option(metavar="ID", help="List those older than this one, the `next` of a list.")] = "",
    as_json: Json = False,
) -> int:
    """List the tickets that failed permanently, and why."""
    run, ids = run_and_ids(words or [])
    async with _looking(run, redis_url) as attached:
        letters = [await inspect_dead_letter(attached.store, id) for id in ids]
        listed = None if ids else await inspect_dead_letters(attached.store, limit, before)
    if listed is not None:
        return _answer(listed, as_json)
    if as_json:
        print_json(letters[0] if len(letters) == 1 else letters)
    else:
        show(*map(answer, letters))
    return EXIT_OK


@contextlib.asynccontextmanager
async def _looking(run: str, redis_url: str) -> AsyncIterator[Attached]:
    """Attach to an existing run, and report anything not found in it as a one-line error."""
    async with attach(run, redis_url) as attached:
        await existing(attached)
        try:
            yield attached
        except NotFound as error:
            raise ConsoleError(f"run {attached.name}: {error}", EXIT_CONFIG) from None


async def _account(run: str, redis_url: str, as_json: bool) -> AuditReport:
    """Audit a run and print the result; for a finished run without its Redis, its final audit. Raises `ConsoleError`."""
    try:
        async with attach(run, redis_url) as attached:
            await existing(attached)
            found = await audited(attached.store)
    except ConsoleError as error:
        found = audit_of_end(folder_instead(run, redis_url, error).path)
        if found is None:
            raise error from None
    if as_json:
        print_json(found.as_dict())
    else:
        show(audit_table(found))
    return found


def _answer(found: Answer, as_json: bool) -> int:
    """Print an answer as JSON or for people."""
    if as_json:
        print_json(found)
    else:
        show(answer(found))
    return EXIT_OK
