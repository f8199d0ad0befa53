"""Commands that only read: ls, status, logs, samples, compare, web, audit, checkpoints, cost, export, record, replay-step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from services.console.commands import finish
from services.console.options import Json, RedisUrl, Run, WaitS


def ls(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of run folders (run.dir).")] = Path("runs"),
    as_json: Json = False,
) -> int:
    """List the runs on this machine, the newest last.

    The list has their state, steps and reward.
    """
    from services.console.commands import folders

    return folders.ls(folder, as_json)


def logs(
    run: Run = "",
    service: Annotated[str, typer.Argument(metavar="SERVICE", help="A pod or a kind of service; default: all.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each log to print first.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")] = False,
    as_json: Json = False,
) -> int:
    """Print the logs of a run's services."""
    from services.console.commands import folders

    return folders.logs(run, service, lines, follow, as_json)


def samples(
    run: Run = "",
    where: Annotated[
        str, typer.Option(metavar="EXPRESSION", help="Completions to find, e.g. 'reward < 0.2 and step > 40'.")
    ] = "",
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help="Sort by this column, lowest first; default: the newest first.")
    ] = "",
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Completions to print.")] = 20,
    offset: Annotated[int, typer.Option(min=0, max=2**31, help="Completions to skip.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Print whole texts instead of a table.")] = False,
    as_json: Json = False,
) -> int:
    """Search the completions of a run.

    This works during the run and afterwards. An expression compares columns (reward, advantage, step, length, outcome,
    source, solved, truncated, score.NAME and more), joined by and, or and not; 'text' in completion searches texts. An
    unknown column lists all names.
    """
    from services.console.inspect import samples as log

    return log.samples(run, where, sort, reverse, offset, limit, full, as_json)


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or run name under runs/.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="The other run.")],
    metric: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Compare this metric; may be repeated.")] = None,
    as_json: Json = False,
) -> int:
    """Compare configurations, curves and evaluations of two runs.

    It reads their folders and needs no server.
    """
    from services.console.inspect import compare as verb

    return verb.compare(first, second, metric or [], as_json)


def status(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Show a run's state, last step and pods."""
    from services.console.commands import verbs

    return finish(verbs.status(run, redis_url, as_json))


def web(
    run: Run = "",
    redis_url: RedisUrl = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on; default: api.host.")] = "",
    as_json: Json = False,
) -> int:
    """Serve the web console of a run.

    The console shows what status and inspect show, live, with charts and controls. The command prints the address and serves the
    page until Ctrl-C. The controls need the run's token. With --json, the first line is an object with the address and the login
    links, and each later change of the run's state is another line.
    """
    from services.console.commands import web as page

    return finish(page.web(run, redis_url, host, port, as_json))


def audit(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Account for every ticket of a run.

    The run may be running, stopped or finished. Exit code 1: a ticket was lost or duplicated, or slots leaked.
    """
    from services.console.commands import verbs

    return finish(verbs.audit(run, redis_url, as_json))


def checkpoints(
    run: Run = "",
    as_json: Json = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and verify its checksum.")] = False,
) -> int:
    """List the checkpoints of a run, from its folder.

    Exit code 1: a checkpoint cannot be loaded. --verify also finds damaged files.
    """
    from services.console.commands import checkpoints as verbs

    return verbs.checkpoints(run, as_json, verify)


def cost(
    run: Run = "",
    price: Annotated[float, typer.Option(min=0, help="Price of a device-hour, to print costs.")] = 0.0,
    as_json: Json = False,
) -> int:
    """Show how a run's device time was spent.

    Time is divided by outcome: trained, filtered, stale, idle, loading, syncing and more. The command reads the run's folder and
    needs no server. A device is a GPU, or on a machine without GPUs a process.
    """
    from services.console.inspect import cost as verb

    return verb.cost(run, price, as_json)


def export(
    run: Run = "",
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder to write; default: RUN/exports/step-N, or RUN/exports/latest.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint; default: the latest one.")] = None,
    as_json: Json = False,
) -> int:
    """Write a checkpoint as a model in Hugging Face format.

    The model has its tokenizer, chat template and sampling defaults. The command reads the run's folder and needs no server.
    Adapters are merged into the model and also written next to it. An earlier export in OUT is replaced; any other folder is
    refused.
    """
    from services.console.inspect import export as verb

    return verb.export(run, out, step, as_json)


def record(
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="Step to record.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write; default: NAME-step-N.bundle.")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Include the weights; otherwise the bundle refers to them.")] = False,
    wait_s: WaitS = 0,
    as_json: Json = False,
) -> int:
    """Write a step of a run to one file, a bundle.

    The bundle has the step's plan, headers, payloads, configuration, versions, weights and results. A step can be recorded
    until a checkpoint covers it. The bundle begins at the last checkpoint before the step, so it also has the steps in
    between. It contains prompts, completions and answers.
    """
    from services.console.bundles import record as verb

    return finish(verb.record(run, step, redis_url, out, weights, wait_s, as_json))


def replay_step(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="File that grpo record wrote.")],
    stage: Annotated[
        Literal["score", "settle", "pack", "loss", "train"], typer.Option(help="Stage to repeat; train includes loss.")
    ] = "train",
    tolerance: Annotated[
        float, typer.Option(min=0, help="Relative difference between numbers that still counts as equal.")
    ] = 0.0,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run code and call services that the bundle names; only if you trust it.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write logprobs and entropy of the step by token (loss, train).")
    ] = None,
    against: Annotated[Path | None, typer.Option(metavar="FILE", help="Compare with what --save wrote, by token.")] = None,
    as_json: Json = False,
) -> int:
    """Repeat a stage of a recorded step and compare the results.

    It needs no Redis, generators or GPU. Exit code 1: something differs; the first difference is printed. Nothing in a bundle
    is executed without --run-code.
    """
    from services.console.bundles import replay as verb

    return verb.replay(bundle, stage, tolerance, run_code, save, against, as_json)
