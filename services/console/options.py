"""Options and arguments shared by several commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from services.console.errors import EXIT_STOPPED


def show_version(wanted: bool) -> None:
    """Print the version of the installed package and exit."""
    if wanted:
        print(f"grpo {installed_version() or '(not installed)'}")
        raise typer.Exit


def installed_version() -> str:
    """Return the version of the installed package, or "" if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("grpo")
    except PackageNotFoundError:
        return ""


def confirm(question: str) -> None:
    """Ask a question on a terminal; end the command unless the answer is yes."""
    if sys.stdin.isatty() and sys.stderr.isatty() and not typer.confirm(question, err=True):
        raise typer.Exit(EXIT_STOPPED)


Version = Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")]

KUBE_CONTEXT = "--kube-context"
NAMESPACES = ("-n", "--namespace")
KubeContext = Annotated[
    str,
    typer.Option(
        KUBE_CONTEXT, metavar="CONTEXT",
        help="Run the command in a pod on a cluster: RUN is the release, CONTEXT a context of your kubeconfig."
    ),
]  # fmt: skip
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Namespace of the release, with --kube-context; default: the context's."
    ),
]

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or run name under runs/; default: the newest run.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="TOML configuration file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Keys that override the file's.")]
Role = Annotated[str, typer.Option(help="all, generator, dataprep or trainer.")]
Why = Annotated[str, typer.Option(help="Reason, recorded with the run.")]
RedisUrl = Annotated[str, typer.Option(help="Redis of the run, redis://host:port/0; default: from the run folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Api = Annotated[str, typer.Option(help="Send the request to this service, https://host:port, instead of Redis.")]
TokenFile = Annotated[
    str, typer.Option(help="File with the bearer token for the service; default: $GRPO_API_TOKEN, or the run folder's.")
]
CaFile = Annotated[
    str, typer.Option(help="CA bundle (PEM) used to verify the server certificate; default: api.ca_file, or the system's.")
]
WaitS = Annotated[
    float,
    typer.Option(
        "--wait", metavar="[SECONDS]", min=0, max=3600, show_default=False,
        help="Wait for completion, at most this long; without a number: 300.",
    ),
]  # fmt: skip
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask on a terminal.")]
DEFAULT_WAIT_S = 300  # of `--wait` without a number
SMOKE_WAIT_S = 600  # the same of `grpo smoke`, which waits for steps
