"""Commands that start a run or prepare for it: init, run, fork, smoke, acl, doctor, score, rows, config, version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.console.commands import finish
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.options import SMOKE_WAIT_S, File, Json, Overrides, RedisUrl, Run, Yes


def init(
    file: Annotated[Path, typer.Argument(metavar="PATH", help="File to write; it must not exist.")] = Path("run.toml"),
    model: Annotated[str, typer.Option(help="Folder or hub name of the model; default: Qwen/Qwen3-0.6B.")] = "",
    data: Annotated[
        str,
        typer.Option(
            help="JSONL or parquet file of prompts, also as hf://datasets/OWNER/NAME/FILE; default: a reasoning-gym task."
        ),
    ] = "",
    prompt_field: Annotated[
        str, typer.Option(metavar="NAME", help="Field of the data that is the prompt; default: by its name, such as question.")
    ] = "",
    reward: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="Your reward function, or math or exact; default: depends on the data.")
    ] = "",
    environment: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="Your environment, a class, or your agent, a function; default: none.")
    ] = "",
    tool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="python|COMMAND|URL",
            help="Tool for the policy: python runs code that it writes; a command or URL is an MCP server. Repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Write a configuration file for a model, data and a reward, an environment or tools.

    It inspects them and, on a terminal, asks for what is not given. The file is short and commented, and passes `grpo doctor`.
    An existing file is never overwritten.
    """
    from services.console.commands import init as initial

    return initial.init(file, model, data, prompt_field, reward, environment, tool or [], as_json)


def run(
    file: File,
    overrides: Overrides = None,
    redis_url: Annotated[str, typer.Option(help="Redis to use; default: redis.url, or else a server started for the run.")] = "",
    screen: Annotated[bool, typer.Option("--screen/--no-screen", help="Show a live screen, or print one line per step.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete any earlier run of this name and start over.")] = False,
    resume: Annotated[
        str, typer.Option(metavar="latest|STEP", help="Fail unless the run exists; with STEP, restore that checkpoint first.")
    ] = "",
    web: Annotated[bool, typer.Option("--web", help="Serve the web console, on web.port or a free port.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> int:
    """Run a configuration on this machine until it finishes. Rerun the same command to resume a stopped run.

    The run resumes from its state in Redis or, without one, from the last checkpoint. With --resume STEP it first returns to that
    checkpoint and retrains the steps after it.
    All files are in run.dir/run.name: config.toml, logs/, checkpoints/, metrics.jsonl, summary.json, report.png.
    Ctrl-C stops the run cleanly; press it again to kill the services. With --json, the summary is printed at the end and
    everything else on standard error.
    """
    from services.console.run.command import run as run_here
    from services.console.run.load import Options

    return run_here(Options(file, overrides or [], redis_url, screen, fresh, resume, web, yes, as_json))


def version(as_json: Json = False) -> int:
    """Print the versions of grpo, Python and the main packages."""
    from services.console.commands import version as versions

    return versions.version(as_json)


def fork(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or run name under runs/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="section.key=value", help="Settings that differ; run.name names the new run.")
    ] = None,
    at: Annotated[
        int | None, typer.Option("--at", metavar="STEP", min=0, help="Step of a checkpoint; default: the latest.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Create a run from a checkpoint of another run.

    The new run has settings of its own and a folder next to the old one. It continues with the policy, the optimizer state
    and the prompts of that step. The command writes the new run's configuration file and prints how to start it.
    """
    from services.console.run import fork as forking

    return forking.fork(run, at, overrides or [], as_json)


def smoke(
    run: Run = "",
    redis_url: RedisUrl = "",
    steps: Annotated[int, typer.Option(min=1, help="Number of further steps to wait for.")] = 3,
    limit_s: Annotated[
        float,
        typer.Option(
            "--wait",
            "--limit-s",
            metavar="[SECONDS]",
            min=0,
            show_default=False,
            help="Wait for them, at most this long; default: 600.",
        ),
    ] = SMOKE_WAIT_S,
    as_json: Json = False,
) -> int:
    """Verify that a run makes progress.

    The run must train a few more steps, or finish, without losing a ticket. This command only reads. Exit code 1: the run made
    too little progress in time; the message says why.
    """
    from services.console.commands import smoke as smoking

    return finish(smoking.smoke(run, redis_url, steps, limit_s, as_json))


def acl(
    run: Annotated[str, typer.Argument(metavar="NAME", help="Name of the run (run.name).")],
    users: Annotated[
        Path, typer.Option("--users", metavar="DIR", help="Folder of passwords (redis.password_file); missing ones are created.")
    ],
    as_json: Json = False,
) -> int:
    """Print the Redis users of a run as lines of an ACL file.

    There is one user per kind of service, with a password digest.
    `grpo run` adds them to its own server. For any other server, add the lines there and give each pod the password of its kind.
    """
    from services.console.printable import print_json
    from services.console.run.secrets import user_passwords
    from services.store.acl import users as lines

    given = list(lines(run, user_passwords(users)))
    if as_json:
        print_json({"run": run, "users": given})
    else:
        print(*given, sep="\n")
    return EXIT_OK


def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="TOML configuration file; default in a pod: the pod's own.")
    ] = None,
    overrides: Overrides = None,
    redis_url: RedisUrl = "",
    as_json: Json = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="In a pod of a release: check Redis, model, data and services, not the pod itself.")
    ] = False,
) -> int:
    """Check this machine, its Redis and a configuration.

    Each problem comes with a remedy. Exit code 1: a problem would stop the run.
    """
    from services.console.commands import doctor as visit

    return finish(visit.doctor(file, overrides or [], redis_url, as_json, cluster))


def score(
    file: File,
    overrides: Overrides = None,
    completions: Annotated[
        Path | None,
        typer.Option(metavar="JSONL", help="Completions to score, a JSON object per line; default: each source's first answer."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Score completions with the verifiers of a configuration.

    No run is started. Each line of the file has `completion` (a text, or a list of texts for a group) and either `row`,
    the number of a data row from 0, or the fields of a row. With several prompt sources it also has `source`. Exit code 1: a
    completion has no score.
    """
    from services.console.commands import score as scoring

    return finish(scoring.score(file, overrides or [], completions, as_json))


def rows(
    file: File,
    overrides: Overrides = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum rows per file; default: all.")] = None,
    as_json: Json = False,
) -> int:
    """Write the prompts of environments that bring their own data.

    Each JSONL source that names an environment of kind verifiers gets its file, unless it exists: the environment's training set
    for [[data.sources]], its evaluation set for [[evaluation.sources]].
    """
    from services.console.initial import rows as own_rows

    return finish(own_rows.rows(file, overrides or [], limit, as_json))


def config(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="TOML configuration file.")] = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print every key with its type, default and meaning.")] = False,
    as_json: Json = False,
) -> int:
    """Validate a configuration and print it with all defaults.

    With --explain, print a reference of every key instead.
    """
    if explain:
        from services.config import explain as explanation

        print(explanation.as_json() if as_json else explanation.as_text())
        return EXIT_OK
    if file is None:
        raise ConsoleError("missing configuration file: give one, or --explain", EXIT_CONFIG)
    from services.config import load, to_toml

    loaded = load(file, overrides or [])
    print(loaded.model_dump_json(indent=2) if as_json else to_toml(loaded).rstrip())
    return EXIT_OK
