"""Shows a run from its folder alone, for `grpo status`, `audit`, `inspect ledger` and `web` where its Redis is missing or cannot
be used.

Guarantees: a running run is never shown from its folder: its Redis is then only unreachable, which is an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.console import paths
from services.console.errors import EXIT_CONFIG, EXIT_REDIS, ConsoleError
from services.console.paths import RunPaths
from services.console.printable import print_json, printable
from services.console.run import conditions
from services.operations import figures
from services.operations.condition import Condition
from services.operations.history import recorded

if TYPE_CHECKING:
    from services.config import RunConfig

NOTE = "without its Redis: showing the files in its folder"


def folder_instead(run: str, redis_url: str, error: ConsoleError) -> RunPaths:
    """Print `error`, which says why a run's Redis cannot be used, and return its folder.

    Raise it if the run was not trained or is running.
    """
    folder = None if redis_url else paths.find(run)
    gone = error.code in (EXIT_REDIS, EXIT_CONFIG)
    if folder is None or not gone or folder.untrained or conditions.of(folder).word in ("running", "paused"):
        raise error
    print(printable(error), file=sys.stderr, flush=True)
    return folder


def show_status(folder: RunPaths, as_json: bool) -> None:
    """Print the run's last condition."""
    (name, steps), found = folder.keys("run.name", "run.steps"), conditions.of(folder)
    last: dict[str, Any] = next(reversed(list(recorded(folder.metrics))), {})
    rounds = list(recorded(folder.evaluations))
    if as_json:
        print_json({
            "run": name, "condition": vars(found), "state": None, "pods": [], "last_step": last,
            "evaluation": {"last": rounds[-1] if rounds else {}}, "note": NOTE,
        })  # fmt: skip
        return
    print(f"{printable(name)}  {int(last.get('step', -1)) + 1}/{steps} steps  {printable(found)}")
    if last:
        print(printable(figures.step_line(last, steps, None)))
    if rounds:
        print(printable(figures.evaluation_line(rounds[-1])))
    print(NOTE)


def describe(folder: RunPaths) -> Condition:
    """Return how the run ended or stopped."""
    return conditions.of(folder)


@contextlib.contextmanager
def with_tokens(config: RunConfig, folder: RunPaths) -> Iterator[RunConfig]:
    """Yield the configuration with the folder's own tokens, or with one for this page only if there are none to be read."""
    import secrets

    with tempfile.TemporaryDirectory(prefix="grpo-web-") as work:
        token, read = folder.token, folder.read_token
        if not os.access(token, os.R_OK):
            token = Path(work) / "token"
            token.write_text(secrets.token_urlsafe())
            token.chmod(0o600)
        given = {"token_file": str(token), "read_token_file": str(read) if os.access(read, os.R_OK) else ""}
        yield config.model_copy(update={"api": config.api.model_copy(update=given)})
