"""The tools that prompts show to the model: those that a source's environment offers in all of its rollouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

from services.chat.errors import DataError
from services.config.environments import EnvironmentConfig, drives_itself
from services.confined.scratch import Scratch
from services.confined.worker import START_LIMIT_S, in_interpreter, worker_environment

ASKED = "services.environment.programs.kinds"  # the environment's code runs there, without secrets
GUARD = "services.confined.guard"  # ends whatever that code has started

_asking = set[subprocess.Popen[str]]()


def tools_of(environment: EnvironmentConfig | None) -> list[dict[str, Any]]:
    """Return the tools that prompts of sources with this environment show, in OpenAI's form. Raises `DataError`."""
    if environment is None or drives_itself(environment):  # it names its tools in each call
        return []
    return json.loads(
        _asked(environment.name, environment.model_dump_json(), tuple(environment.inherited), environment.interpreter)
    )


def give_up() -> None:
    """End the processes that are asked now, which Ctrl-C does not reach: whoever waits for one gets a `DataError`."""
    for asked in list(_asking):
        asked.terminate()


@cache
def _asked(name: str, environment: str, kept: tuple[str, ...], interpreter: str) -> str:
    """Return the tools as JSON; training and evaluation ask for the same ones."""
    scratch = Scratch()
    try:
        python, variables = in_interpreter(interpreter, scratch.path, worker_environment(scratch.path, kept))
        with subprocess.Popen(
            [sys.executable, "-S", "-m", GUARD, str(os.getpid()), python, "-m", ASKED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=scratch.path,
            env=variables,
            process_group=0,  # keeps Ctrl-C from reaching it
        ) as asked:
            _asking.add(asked)
            try:
                answer, _ = asked.communicate(environment, timeout=START_LIMIT_S)
            finally:
                _asking.discard(asked)
                asked.terminate()
        if asked.returncode:
            raise subprocess.CalledProcessError(asked.returncode, ASKED)
        found = json.loads(answer)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        raise DataError(f"environment {name!r} cannot be asked for its tools: {error}; see its output above") from None
    finally:
        scratch.remove()
    if found.get("error"):
        raise DataError(f"environment {name!r} cannot be used: {found['error']}")
    return json.dumps(found["tools"])
