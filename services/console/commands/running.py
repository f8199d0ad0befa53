"""Commands that start a run, and those that look at what it needs before: run, smoke, acl, doctor, config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.console.commands import finish
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.options import File, Json, Listen, Overrides, Reach, RedisUrl, Run


def run(
    file: File,
    overrides: Overrides = None,
    redis_url: Annotated[str, typer.Option(help="Use this Redis; default: redis.url, or else a server of the run's own.")] = "",
    screen: Annotated[bool, typer.Option("--screen/--no-screen", help="Live screen on a terminal, or a line a step.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what a run of this name left, and start it anew.")] = False,
    resume: Annotated[
        str, typer.Option(metavar="latest|STEP", help="Go on only if there is a run; with a step, from its checkpoint.")
    ] = "",
    web: Annotated[bool, typer.Option("--web", help="Serve the web console, on web.port or a free one.")] = False,
) -> int:
    """Run a configuration on this machine, to its end. The same command continues a run that was stopped.

    It goes on where Redis knows the run to be, else from the last checkpoint. With --resume STEP it goes back to that checkpoint,
    and what came after is trained anew.
    Everything lies in run.dir/run.name: config.toml, logs/, checkpoints/, metrics.jsonl, summary.json, report.png.
    Ctrl-C stops the run in order; a second one ends it at once.
    """
    from services.console.local.run import Options
    from services.console.local.run import run as run_here

    return run_here(Options(file, overrides or [], redis_url, screen, fresh, resume, web))


def smoke(
    run: Run = "",
    redis_url: RedisUrl = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to see trained.")] = 3,
    limit_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for them.")] = 600.0,
) -> int:
    """See that a run gets on: so many more steps are trained, or it ends, and no ticket is lost.

    It watches and changes nothing. Exit code 1 says that the run did not get on in time, and why.
    """
    from services.console.commands import smoke as smoking

    return finish(smoking.smoke(run, redis_url, steps, limit_s))


def acl(
    run: Annotated[str, typer.Argument(metavar="NAME", help="Name of the run (run.name).")],
    users: Annotated[
        Path, typer.Option("--users", metavar="DIR", help="Folder of passwords, redis.users_dir; missing ones are made.")
    ],
) -> int:
    """Print the Redis users of a run, one a kind of service, as lines of an access list with digests of their passwords.

    `grpo run` makes its own server know them; elsewhere give them to the server, and each pod the password of its kind.
    """
    from services.console.local.secrets import user_passwords
    from services.store.acl import users as lines

    for line in lines(run, user_passwords(users)):
        print(line)
    return EXIT_OK


def doctor(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Configuration, TOML; in a pod default: its own.")] = None,
    overrides: Overrides = None,
    redis_url: RedisUrl = "",
    as_json: Json = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="In a pod of a release: look at Redis, model, data and services, not at the pod.")
    ] = False,
    listen: Listen = False,
    reach: Reach = "",
) -> int:
    """Check this machine, its Redis and a configuration before a run, and say what to do about each finding.

    Exit code 1 says that something would keep the run from starting, or from going on.
    """
    from services.console.doctor import visit

    if listen and reach:
        raise ConsoleError("--listen is for one machine, --reach for the other: give one of them", EXIT_CONFIG)
    if listen or reach:
        return visit.network(file, overrides or [], reach, as_json)
    return finish(visit.doctor(file, overrides or [], redis_url, as_json, cluster))


def config(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Configuration, TOML.")] = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every key with its type, default and meaning.")] = False,
    as_json: Json = False,
) -> int:
    """Print a configuration, checked and complete.

    Or, with --explain, every key that there is.
    """
    if explain:
        from services.config import explain as explanation

        print(explanation.as_json() if as_json else explanation.as_text())
        return EXIT_OK
    if file is None:
        raise ConsoleError("give a configuration file, or --explain", EXIT_CONFIG)
    from services.config import load, to_toml

    loaded = load(file, overrides or [])
    print(loaded.model_dump_json(indent=2) if as_json else to_toml(loaded).rstrip())
    return EXIT_OK
