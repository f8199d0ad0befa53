"""The commands that start a run: run, fork."""

from __future__ import annotations

from typing import Annotated

import typer

from services.console.options import File, Json, NamedRun, Overrides, RedisUrl, Yes
from services.console.run import command
from services.console.run import fork as forking
from services.console.run.place import Options


def run(
    file: File,
    overrides: Overrides = None,
    redis_url: RedisUrl = "",
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
    return command.run(Options(file, overrides or [], redis_url, screen, fresh, resume, web, yes, as_json))


def fork(
    run: NamedRun,
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
    return forking.fork(run, at, overrides or [], as_json)
