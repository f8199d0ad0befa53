"""Options and arguments shared by several commands."""

from __future__ import annotations

import getpass
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from services.config.secrets import shown, split_password
from services.console.errors import EXIT_STOPPED

DEFAULT_WAIT_S = 300  # of `--wait` without a number
SMOKE_WAIT_S = 600  # the same of `grpo smoke`, which waits for steps


def installed_version(package: str = "grpo") -> str:
    """Return the version of an installed package, or "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def who() -> str:
    """Return the name of the user, for the run's records; in a container a user id may have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def confirm(question: str) -> None:
    """Ask a question on a terminal; end the command unless the answer is yes."""
    if sys.stdin.isatty() and sys.stderr.isatty() and not typer.confirm(question, err=True):
        raise typer.Exit(EXIT_STOPPED)


def _redis_address(url: str) -> str:
    try:
        split_password(url)
    except ValueError as error:
        raise typer.BadParameter(f"{shown('redis_url', url)} {error}") from None
    return url


Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or run name under runs/; default: the newest run.")]
NamedRun = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or run name under runs/.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="TOML configuration file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Keys that override the file's.")]
Role = Annotated[str, typer.Option(help="all, generator, dataprep or trainer.")]
Why = Annotated[str, typer.Option(help="Reason, recorded with the run.")]
RedisUrl = Annotated[
    str, typer.Option(help="Redis of the run, redis://host:port/0; default: its configuration's.", callback=_redis_address)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Limit = Annotated[int, typer.Option(min=1, max=500, help="Entries to show.")]
Offset = Annotated[int, typer.Option(min=0, max=2**31, help="Entries to skip.")]
Reverse = Annotated[bool, typer.Option("--reverse", help="Reverse the order.")]
WaitS = Annotated[
    float,
    typer.Option(
        "--wait",
        metavar="[SECONDS]",
        min=0,
        max=3600,
        show_default=False,
        help="Wait for completion, at most this long; without a number: 300.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask on a terminal.")]
