"""Defines `grpo inspect …` and `grpo replay …`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from services.console.commands import finish
from services.console.options import Api, CaFile, Json, RedisUrl, Run, TokenFile

inspect_app = typer.Typer(help="Inspect the contents and history of a run.", rich_markup_mode=None)
replay_app = typer.Typer(help="Requeue failed tickets.", rich_markup_mode=None)

ENTRY_ID = re.compile(r"\d{13,}-\d+")  # it begins with milliseconds since 1970; a run may be named 2024-11
Limit = Annotated[int, typer.Option(min=1, max=500, help="Entries to show.")]
Offset = Annotated[int, typer.Option(min=0, max=2**31, help="Entries to skip.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Requeue the dead letters whose reason contains this text.")]


@inspect_app.command()
def buffer(
    run: Run = "",
    redis_url: RedisUrl = "",
    sort: Annotated[
        Literal["order", "version", "weight"], typer.Option(help="Sort by order of issue, oldest policy version or weight.")
    ] = "order",
    reverse: Annotated[bool, typer.Option("--reverse", help="Show the highest first.")] = False,
    limit: Limit = 20,
    offset: Offset = 0,
    as_json: Json = False,
) -> int:
    """Show the replay table: how full it is, how it is sampled, and its groups."""
    from services.console.inspect import verbs

    return finish(verbs.buffer(run, redis_url, sort, reverse, offset, limit, as_json))


@inspect_app.command()
def group(
    ticket: Annotated[str, typer.Argument(metavar="TICKET", help="The group's ticket, <epoch>-<row>.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    limit: Annotated[int, typer.Option(min=1, max=64, help="Completions to show.")] = 16,
    offset: Annotated[int, typer.Option(min=0, max=2**31, help="Completions to skip.")] = 0,
    as_json: Json = False,
) -> int:
    """Show one group: where it is or how it ended, its prompt, completions, scores and advantages."""
    from services.console.inspect import verbs

    return finish(verbs.group(run, redis_url, ticket, offset, limit, as_json))


@inspect_app.command()
def step(
    number: Annotated[int, typer.Argument(metavar="STEP", min=0, max=2**31, help="Number of the step, from 0.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    limit: Limit = 100,
    offset: Offset = 0,
    as_json: Json = False,
) -> int:
    """Show one step: its groups and how they are packed or, once the step is retired, its metrics."""
    from services.console.inspect import verbs

    return finish(verbs.step(run, redis_url, number, offset, limit, as_json))


@inspect_app.command()
def ledger(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Show where all tickets are and how they ended, counted at one instant. `grpo audit` also checks the counts."""
    from services.console.inspect import verbs

    return finish(verbs.ledger(run, redis_url, as_json))


@inspect_app.command()
def sync(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Show weight sync: the last round, what the trainer sent, and each generator's version and pauses."""
    from services.console.inspect import verbs

    return finish(verbs.sync(run, redis_url, as_json))


@inspect_app.command()
def deadletter(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]... [RUN]", help="Dead letters to show with their bodies; default: list them."),
    ] = None,
    redis_url: RedisUrl = "",
    limit: Limit = 20,
    before: Annotated[str, typer.Option(metavar="ID", help="List those older than this one.")] = "",
    as_json: Json = False,
) -> int:
    """List the tickets that failed permanently, and why."""
    from services.console.inspect import verbs

    run, ids = run_and_ids(words or [])
    if ids:
        return finish(verbs.dead_letter(run, redis_url, ids, as_json))
    return finish(verbs.dead_letters(run, redis_url, limit, before, as_json))


@replay_app.command()
def requeue(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN] [ID]...", help="Run folder or run name, and ids of dead letters.")
    ] = None,
    redis_url: RedisUrl = "",
    everything: Annotated[bool, typer.Option("--all", help="Requeue all dead letters.")] = False,
    reason: Reason = "",
    as_json: Json = False,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
) -> int:
    """Requeue the tickets of dead letters.

    A dead letter stays, with a reason, if it never counted as failed or if its ticket has moved on since. Exit code 1: nothing
    was requeued. --api must be dataprep's address.
    """
    from services.console.commands.control import Target
    from services.console.inspect import verbs

    run, ids = run_and_ids(words or [])
    return finish(verbs.requeue(Target(run, redis_url, api, token_file, ca_file), ids, everything, reason, as_json))


def run_and_ids(words: Sequence[str]) -> tuple[str, list[str]]:
    """Tell a run's name or folder from ids of dead letters, which look like 1790000000000-0."""
    runs = [word for word in words if not ENTRY_ID.fullmatch(word)]
    if len(runs) > 1:
        raise typer.BadParameter(f"{runs[1]!r} is not the id of a dead letter: grpo inspect deadletter lists them")
    return "".join(runs), [word for word in words if ENTRY_ID.fullmatch(word)]
