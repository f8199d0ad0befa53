"""`grpo inspect …` and `grpo replay …`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from services.console.commands import finish
from services.console.options import Json, RedisUrl

inspect_app = typer.Typer(help="Look into a run: what is in it, and what became of it.", rich_markup_mode=None)
replay_app = typer.Typer(help="Put back what failed.", rich_markup_mode=None)

Run = Annotated[
    str, typer.Option("--run", metavar="RUN", help="Folder of the run, or its name under runs/; default: the newest.")
]
Limit = Annotated[int, typer.Option(min=1, max=500, help="Entries to show.")]
Offset = Annotated[int, typer.Option(min=0, max=2**31, help="Entries to pass over.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Dead letters whose reason contains this.")]


@inspect_app.command()
def buffer(
    run: Run = "",
    redis_url: RedisUrl = "",
    sort: Annotated[
        Literal["order", "version", "weight"], typer.Option(help="Order of issue, oldest version or weight.")
    ] = "order",
    reverse: Annotated[bool, typer.Option("--reverse", help="Highest first.")] = False,
    limit: Limit = 20,
    offset: Offset = 0,
    as_json: Json = False,
) -> int:
    """The replay table: how full it is, how it is drawn from, and its groups."""
    from services.console.inspect import verbs as inspect_verbs

    return finish(inspect_verbs.buffer(run, redis_url, sort, reverse, offset, limit, as_json))


@inspect_app.command()
def group(
    ticket: Annotated[str, typer.Argument(metavar="TICKET", help="The group's ticket, <epoch>-<row>.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    limit: Annotated[int, typer.Option(min=1, max=64, help="Completions to show.")] = 16,
    offset: Annotated[int, typer.Option(min=0, max=2**31, help="Completions to pass over.")] = 0,
    as_json: Json = False,
) -> int:
    """One group: where it is or how it ended, its prompt, completions, scores and advantages."""
    from services.console.inspect import verbs as inspect_verbs

    return finish(inspect_verbs.group(run, redis_url, ticket, offset, limit, as_json))


@inspect_app.command()
def step(
    number: Annotated[int, typer.Argument(metavar="STEP", min=0, max=2**31, help="The step, from 0.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    limit: Limit = 100,
    offset: Offset = 0,
    as_json: Json = False,
) -> int:
    """One step: the groups it trains on and how they are laid out; of a retired one, its metrics."""
    from services.console.inspect import verbs as inspect_verbs

    return finish(inspect_verbs.step(run, redis_url, number, offset, limit, as_json))


@inspect_app.command()
def ledger(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Where all tickets are and how they ended, counted in one instant; `grpo audit` judges it too."""
    from services.console.inspect import verbs as inspect_verbs

    return finish(inspect_verbs.ledger(run, redis_url, as_json))


@inspect_app.command()
def deadletter(
    id: Annotated[str, typer.Argument(metavar="ID", help="A dead letter, to see what was in it; default: a list.")] = "",
    run: Run = "",
    redis_url: RedisUrl = "",
    limit: Limit = 20,
    before: Annotated[str, typer.Option(metavar="ID", help="List those before this one.")] = "",
    as_json: Json = False,
) -> int:
    """What failed for good, and why."""
    from services.console.inspect import verbs as inspect_verbs

    if id:
        return finish(inspect_verbs.dead_letter(run, redis_url, id, as_json))
    return finish(inspect_verbs.dead_letters(run, redis_url, limit, before, as_json))


@replay_app.command()
def requeue(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Dead letters, by id.")] = None,
    run: Run = "",
    redis_url: RedisUrl = "",
    everything: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    reason: Reason = "",
    as_json: Json = False,
) -> int:
    """Have the tickets of dead letters issued again.

    Those that never counted as failed, or whose ticket is elsewhere by now, stay, each with its reason; exit code 1 says that
    none was put back.
    """
    from services.console.inspect import verbs as inspect_verbs

    return finish(inspect_verbs.requeue(run, redis_url, ids or [], everything, reason, as_json))
