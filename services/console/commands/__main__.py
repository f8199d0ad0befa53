"""The `grpo` command: `python -m services.console.commands`.

Guarantees: an error prints one line, `error: …`, on standard error and sets the exit code; it never prints a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError
from typer.exceptions import TyperException

from services.config import ConfigError
from services.console.commands import compare, config, cost, doctor, export, init, look, run, samples, score, steer, web
from services.console.commands import inspect as inspection
from services.console.errors import EXIT_CODES, EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_REDIS, EXIT_STOPPED, ConsoleError
from services.console.options import DEFAULT_WAIT_S, SMOKE_WAIT_S, installed_version
from services.console.printable import say
from services.protocol.errors import DifferentRun, StoreError
from services.runtime.atomic_folders import FolderError

COMMANDS: Sequence[Callable[..., Any]] = (  # in the order of --help
    *(init.init, run.run, run.fork, look.ls, look.status, look.logs, samples.samples, compare.compare, web.web, inspection.audit),
    *(steer.pause, steer.resume, steer.scale, look.smoke, steer.drain, config.acl, steer.checkpoint, steer.restore),
    *(look.checkpoints, cost.cost, export.export, steer.stop, doctor.doctor, score.score, config.rows, config.config),
    config.version,
)
INSPECT: Sequence[Callable[..., Any]] = (
    *(inspection.buffer, inspection.group, inspection.step, inspection.ledger, inspection.sync, inspection.deadletter),
)


def _app(commands: Sequence[Callable[..., Any]], words: str, epilog: str = "") -> typer.Typer:
    app = typer.Typer(help=words, epilog=epilog, rich_markup_mode=None, pretty_exceptions_enable=False)
    for command in commands:
        app.command()(_blocking(command) if inspect.iscoroutinefunction(command) else command)
    return app


def _blocking(command: Callable[..., Any]) -> Callable[..., int]:
    """Return a function with the same signature that runs a coroutine function to its end."""

    @functools.wraps(command)
    def blocking(*given: Any, **named: Any) -> int:
        return asyncio.run(command(*given, **named))

    return blocking


app = _app(COMMANDS, "Run, watch and control asynchronous GRPO training.", EXIT_CODES)
app.add_typer(_app(INSPECT, "Inspect the contents and history of a run."), name="inspect")
app.add_typer(_app([steer.requeue], "Requeue failed tickets."), name="replay")


def show_version(wanted: bool) -> None:
    """Print the version of the installed package and exit."""
    if wanted:
        print(f"grpo {installed_version() or '(not installed)'}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options before a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        given = with_waits(sys.argv[1:] if argv is None else argv)
        result = typer.main.get_command(app).main(args=given or ["--help"], prog_name="grpo", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):  # the latter at a question
        return EXIT_STOPPED
    except (ConfigError, ConsoleError, TyperException, StoreError, RedisError, OSError, FolderError) as error:
        messages, code = _explained(error)
        for message in messages:
            with contextlib.suppress(OSError):  # the exit code says it even if nobody reads the message
                say(f"error: {' '.join(message.split())}")
        return code
    return result if isinstance(result, int) else EXIT_OK


def _explained(error: Exception) -> tuple[Sequence[str], int]:
    """Return what is wrong, one line each, and the exit code."""
    if isinstance(error, ConfigError):
        return error.faults, EXIT_CONFIG
    if isinstance(error, ConsoleError):
        return [str(error)], error.code
    if isinstance(error, TyperException):
        return [_usage(error)], EXIT_CONFIG
    if isinstance(error, StoreError):
        return [str(error)], EXIT_CONFIG if isinstance(error, DifferentRun) else EXIT_REDIS
    if isinstance(error, RedisError):
        return [f"Redis failed: {error}"], EXIT_REDIS
    return [str(error) or type(error).__name__], EXIT_FAILED


def _usage(error: TyperException) -> str:
    """Return what is wrong with a command line."""
    name = str(getattr(error, "option_name", "")).lstrip("-")
    said = error.format_message().replace("Value error, ", "")
    return f"{said}; write {name}=VALUE, without dashes, to override a key" if "." in name else said


def with_waits(argv: Sequence[str]) -> list[str]:
    """Return the arguments with the command's default after each `--wait` that has no number."""
    given, wait_s = list[str](), SMOKE_WAIT_S if "smoke" in argv[:1] else DEFAULT_WAIT_S
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        given.append(word)
        if word == "--wait" and not after.replace(".", "", 1).isdigit():
            given.append(str(wait_s))
    return given


if __name__ == "__main__":
    sys.exit(main())
