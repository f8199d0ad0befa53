"""The reference of the command line: what `grpo COMMAND --help` prints, for every command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from services.console.commands.__main__ import app
from services.console.errors import EXIT_CODES

INTRODUCTION = """# Command line

`RUN` is a run's folder, or its name under `runs/`; without it, a command takes the newest run. `--json` prints JSON. `--wait`
waits until the request has taken effect, at most for the number of seconds given or, without one, 300 (`grpo smoke`: 600).
"""
WIDTH = 110


def page() -> str:
    """Return the page."""
    sections = [f"## {name}\n\n```text\n{text}\n```\n" for name, text in helps()]
    return "\n".join([INTRODUCTION, *sections, f"## Exit codes\n\n{EXIT_CODES}\n"])


def helps() -> Iterator[tuple[str, str]]:
    """Yield every command as it is typed, with its help."""
    for name, command in commands():
        context = command.make_context(name, [], resilient_parsing=True, terminal_width=WIDTH, max_content_width=WIDTH)
        yield name, "\n".join(line.rstrip() for line in command.get_help(context).strip().splitlines())


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command as it is typed, with typer's object for it; a group's commands in place of the group."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for below, inner in getattr(command, "commands", {"": command}).items():
            yield f"grpo {name} {below}".strip(), inner
