"""The `grpo` command.

Guarantees: `--help` imports nothing but typer; an error is one line `error: …` on standard error and an exit code, never a
traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from services.console.errors import EXIT_CODES, EXIT_CONFIG, EXIT_OK, EXIT_REDIS, EXIT_STOPPED, ConsoleError

app = typer.Typer(
    help="Asynchronous GRPO: run it on this machine, watch it, steer it.", epilog=EXIT_CODES,
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip

Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder of the run, or its name under runs/; default: the newest.")]
RedisUrl = Annotated[str, typer.Option(help="Redis of the run, redis://host:port/0; default: what the run's folder says.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="Configuration, TOML.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Keys laid over the file.")]
Role = Annotated[str, typer.Option(help="all, generator, dataprep or trainer.")]
Why = Annotated[str, typer.Option(help="Reason, kept with the run.")]


@app.command()
def run(
    file: File,
    overrides: Overrides = None,
    redis_url: Annotated[str, typer.Option(help="Use this Redis; default: redis.url, or else a server of the run's own.")] = "",
    screen: Annotated[bool, typer.Option("--screen/--no-screen", help="Live screen on a terminal, or a line a step.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what a run of this name left, and start it anew.")] = False,
) -> int:
    """Run a configuration on this machine, to its end. The same command continues a run that was stopped.

    Everything lies in run.dir/run.name: config.toml, logs/, checkpoints/, metrics.jsonl, summary.json, report.png.
    Ctrl-C stops the run in order; a second one ends it at once.
    """
    from services.console.run import Options
    from services.console.run import run as run_here

    return run_here(Options(file, overrides or [], redis_url, screen, fresh))


@app.command()
def status(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Show a run's state, last step and pods."""
    from services.console import verbs

    return _await(verbs.status(run, redis_url, as_json))


@app.command()
def audit(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Account for every ticket of a run.

    The run may be live, stopped or finished; exit code 1 says that a ticket was lost or doubled, or that slots leak.
    """
    from services.console import verbs

    return _await(verbs.audit(run, redis_url, as_json))


@app.command()
def pause(run: Run = "", redis_url: RedisUrl = "", role: Role = "all", why: Why = "") -> int:
    """Pause a role of a run until it is resumed.

    Pods that start later stay paused too.
    """
    from services.console import verbs

    return _await(verbs.pause(run, redis_url, role, why))


@app.command()
def resume(run: Run = "", redis_url: RedisUrl = "", role: Role = "all") -> int:
    """Let a paused role go on."""
    from services.console import verbs

    return _await(verbs.resume(run, redis_url, role))


@app.command()
def stop(run: Run = "", redis_url: RedisUrl = "", why: Why = "") -> int:
    """End a run early, for good.

    The trainer finishes its step, saves and ends the run. To go on later, press Ctrl-C in `grpo run` instead.
    """
    from services.console import verbs

    return _await(verbs.stop(run, redis_url, why))


@app.command()
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
        from services.console import explain as explanation

        print(explanation.as_json() if as_json else explanation.as_text())
        return EXIT_OK
    if file is None:
        raise ConsoleError("give a configuration file, or --explain", EXIT_CONFIG)
    from services.protocol.config import load, to_toml

    loaded = load(file, overrides or [])
    print(loaded.model_dump_json(indent=2) if as_json else to_toml(loaded).rstrip())
    return EXIT_OK


def _await(verb: Any) -> int:
    import asyncio

    return asyncio.run(verb)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    usage_error = typer.BadParameter.__base__  # of typer's own click, which has no public name
    assert usage_error is not None
    try:
        given = list(sys.argv[1:] if argv is None else argv)
        result = typer.main.get_command(app).main(args=given or ["--help"], prog_name="grpo", standalone_mode=False)
    except ConsoleError as error:
        return _report(error, error.code)
    except KeyboardInterrupt:
        return EXIT_STOPPED
    except Exception as error:
        if isinstance(error, usage_error):
            return _report(error.format_message(), EXIT_CONFIG)  # type: ignore[attr-defined]
        return _report_known(error)
    return result if isinstance(result, int) else EXIT_OK


def _report_known(error: Exception) -> int:
    """Errors that say themselves what to do; any other is a bug and keeps its traceback."""
    from redis.exceptions import RedisError

    from services.protocol.config import ConfigError
    from services.protocol.errors import DifferentRun, StoreError

    if isinstance(error, ConfigError | DifferentRun):
        return _report(error, EXIT_CONFIG)
    if isinstance(error, StoreError):
        return _report(error, EXIT_REDIS)
    if isinstance(error, RedisError):
        return _report(f"Redis failed: {error}", EXIT_REDIS)
    raise error


def _report(error: object, code: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
