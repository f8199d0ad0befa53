"""Shows a run from its folder alone, for `grpo status`, `audit`, `inspect ledger` and `web` where its Redis is missing or cannot
be used.

Guarantees: a running run is never shown from its folder: its Redis is then only unreachable, which is an error.
"""

from __future__ import annotations

from typing import Any

from services.console import paths
from services.console.display.text import show
from services.console.errors import EXIT_CONFIG, EXIT_REDIS, ConsoleError
from services.console.paths import RunPaths
from services.console.printable import print_json, printable, say
from services.console.run import conditions
from services.operations import figures
from services.operations.history import recorded

NOTE = "without its Redis: showing the files in its folder"


def folder_instead(run: str, redis_url: str, error: ConsoleError) -> RunPaths:
    """Print `error`, which says why a run's Redis cannot be used, and return its folder.

    Raise it if the run was not trained or is running.
    """
    folder = None if redis_url else paths.find(run)
    gone = error.code in (EXIT_REDIS, EXIT_CONFIG)
    if folder is None or not gone or folder.untrained or conditions.of(folder).word in ("running", "paused"):
        raise error
    say(error)
    return folder


def show_status(folder: RunPaths, as_json: bool) -> None:
    """Print the run's last condition."""
    run, found = folder.settings.run, conditions.of(folder)
    last: dict[str, Any] = next(reversed(list(recorded(folder.metrics))), {})
    rounds = list(recorded(folder.evaluations))
    if as_json:
        evaluation = {"last": rounds[-1] if rounds else {}}
        print_json(
            {
                "run": run.name,
                "condition": vars(found),
                "state": None,
                "pods": [],
                "last_step": last,
                "evaluation": evaluation,
                "note": NOTE,
            }
        )
        return
    lines = [f"{run.name}  {int(last.get('step', -1)) + 1}/{run.steps} steps  {found}"]
    lines += [figures.step_line(last, run.steps, None)] if last else []
    lines += [figures.evaluation_line(rounds[-1])] if rounds else []
    show(*map(printable, lines), NOTE)
