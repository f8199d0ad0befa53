"""The `grpo` command.

Guarantees: `--help` imports only typer. An error prints one line, `error: …`, on standard error and sets the exit code; it
never prints a traceback.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from services.console.arguments import USAGE_ERROR, only, quicken
from services.console.commands import running, steering, watching
from services.console.commands.inspecting import inspect_app, replay_app
from services.console.errors import EXIT_CODES, EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_REDIS, EXIT_STOPPED, ConsoleError
from services.console.options import DEFAULT_WAIT_S, KUBE_CONTEXT, NAMESPACES, SMOKE_WAIT_S, KubeContext, Namespace, Version
from services.console.printable import printable

COLLECT_AFTER = 100_000  # objects created and not deleted; commands that end at once create 30,000 to 50,000

app = typer.Typer(
    help="Run, watch and control asynchronous GRPO training.", epilog=EXIT_CODES,
    add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip


@app.callback()
def options(version: Version = False, kube_context: KubeContext = "", namespace: Namespace = "") -> None:
    """Take the options before a command. Those of a cluster are removed earlier (cluster.py), unless one is missing."""
    if namespace:
        raise ConsoleError(f"--namespace {namespace} needs {KUBE_CONTEXT}: name a context of your kubeconfig", EXIT_CONFIG)


app.add_typer(inspect_app, name="inspect")
app.add_typer(replay_app, name="replay")
for command in (  # in the order of --help
    running.init,
    running.run,
    running.fork,
    watching.ls,
    watching.status,
    watching.logs,
    watching.samples,
    watching.compare,
    watching.web,
    watching.audit,
    steering.pause,
    steering.resume,
    steering.scale,
    running.smoke,
    steering.drain,
    running.acl,
    steering.checkpoint,
    steering.restore,
    watching.checkpoints,
    watching.cost,
    watching.export,
    watching.record,
    watching.replay_step,
    steering.stop,
    running.doctor,
    running.score,
    running.rows,
    running.config,
    running.version,
):
    app.command()(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for them takes longer than most commands
    try:
        given = with_waits(sys.argv[1:] if argv is None else argv)
        if any(word.partition("=")[0] == KUBE_CONTEXT for word in given):
            from services.console.cluster.command import asked, run

            return run(asked(given), typer.main.get_command(app))
        quicken()
        result = typer.main.get_command(only(app, given)).main(args=given or ["--help"], prog_name="grpo", standalone_mode=False)
    except ConsoleError as error:
        return _report(error, error.code)
    except (KeyboardInterrupt, typer.Abort):  # the latter at a question
        return EXIT_STOPPED
    except USAGE_ERROR as error:
        return _report(_usage(error), EXIT_CONFIG)
    except Exception as error:  # our errors, whose types --help does not import; any other is raised again
        return _report_known(error)
    return result if isinstance(result, int) else EXIT_OK


def _usage(error: Any) -> str:
    """Return what is wrong with a command line."""
    name = str(getattr(error, "option_name", "")).lstrip("-")
    said = error.format_message().replace("Value error, ", "")
    return f"{said}; write {name}=VALUE, without dashes, to override a key" if "." in name else said


def with_waits(argv: Sequence[str]) -> list[str]:
    """Return the arguments with the command's default after each `--wait` that has no number."""
    given, wait_s = list[str](), SMOKE_WAIT_S if _verb(argv) == "smoke" else DEFAULT_WAIT_S
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        given.append(word)
        if word == "--wait" and not after.replace(".", "", 1).isdigit():
            given.append(str(wait_s))
    return given


def _verb(argv: Sequence[str]) -> str:
    """Return the name of the command, before which there may be options of a cluster."""
    words = iter(argv)
    for word in words:
        if not word.startswith("-"):
            return word
        if word in (KUBE_CONTEXT, *NAMESPACES):
            next(words, "")
    return ""


def _report_known(error: Exception) -> int:
    """Report an error whose message says what to do. Any other error is a bug and is raised again with its traceback."""
    from redis.exceptions import RedisError

    from services.config import ConfigError
    from services.protocol.errors import DifferentRun, StoreError
    from services.runtime.atomic_folders import FolderError

    if isinstance(error, ConfigError):
        for fault in error.faults:
            _report(fault, EXIT_CONFIG)
        return EXIT_CONFIG
    if isinstance(error, DifferentRun):
        return _report(error, EXIT_CONFIG)
    if isinstance(error, StoreError):
        return _report(error, EXIT_REDIS)
    if isinstance(error, RedisError):
        return _report(f"Redis failed: {error}", EXIT_REDIS)
    if isinstance(error, OSError | FolderError):
        return _report(str(error) or type(error).__name__, EXIT_FAILED)
    raise error


def _report(error: object, code: int) -> int:
    with contextlib.suppress(OSError):  # the exit code says it even if nobody reads the message
        print("error:", printable(" ".join(str(error).split())), file=sys.stderr, flush=True)
    return code


def command_line() -> int:
    """Run a command, the only one of this process, and return its exit code.

    Imports make many objects and hardly any garbage. To look for it among them takes up to a quarter of a command's CPU time, so
    that is done seldom, and not when the process ends.
    """
    gc.set_threshold(COLLECT_AFTER)
    code = main()
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(command_line())
