"""Defines `grpo inspect …` and `grpo replay …`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from services.console.commands import finish
from services.console.options import Json, RedisUrl

inspect_app = typer.Typer(help="Inspect the contents and history of a run.", rich_markup_mode=None)
replay_app = typer.Typer(help="Requeue failed tickets.", rich_markup_mode=None)

Run = Annotated[str, typer.Option("--run", metavar="RUN", help="Run folder, or run name under runs/; default: the newest run.")]
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
    from services.console.inspect import verbs as inspect_verbs

    return finish(inspect_verbs.buffer(run, redis_url, sort, reverse, offset, limit, as_json))


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
    from services.console.inspect import verbs as inspect_verbs

    return finish(inspect_verbs.group(run, redis_url, ticket, offset, limit, as_json))


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
    from services.console.inspect import verbs as inspect_verbs

    return finish(inspect_verbs.step(run, redis_url, number, offset, limit, as_json))


@inspect_app.command()
def ledger(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Show where all tickets are and how they ended, counted at one instant. `grpo audit` also checks the counts."""
    from services.console.inspect import verbs as inspect_verbs

    return finish(inspect_verbs.ledger(run, redis_url, as_json))


@inspect_app.command()
def deadletter(
    id: Annotated[str, typer.Argument(metavar="ID", help="Dead letter to show with its body; default: list them.")] = "",
    run: Run = "",
    redis_url: RedisUrl = "",
    limit: Limit = 20,
    before: Annotated[str, typer.Option(metavar="ID", help="List those older than this one.")] = "",
    as_json: Json = False,
) -> int:
    """List the tickets that failed permanently, and why."""
    from services.console.inspect import verbs as inspect_verbs

    if id:
        return finish(inspect_verbs.dead_letter(run, redis_url, id, as_json))
    return finish(inspect_verbs.dead_letters(run, redis_url, limit, before, as_json))


@replay_app.command()
def requeue(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of dead letters.")] = None,
    run: Run = "",
    redis_url: RedisUrl = "",
    everything: Annotated[bool, typer.Option("--all", help="Requeue all dead letters.")] = False,
    reason: Reason = "",
    as_json: Json = False,
) -> int:
    """Requeue the tickets of dead letters.

    A dead letter stays, with a reason, if it never counted as failed or if its ticket has moved on since. Exit code 1: nothing
    was requeued.
    """
    from services.console.inspect import verbs as inspect_verbs

    return finish(inspect_verbs.requeue(run, redis_url, ids or [], everything, reason, as_json))
