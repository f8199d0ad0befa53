"""The tools that an environment offers in all of its rollouts, so that its groups' prompts can have them.

Run as `python -m services.environment.programs.shared_tools` with the environment's configuration as JSON on standard input: a
process of its own, since the code is not ours. Prints a JSON object with `tools`, or with `error`. Tools that an object of the
class sets for its row are not among them: those the environment pod puts into the rollout's own context.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, cast

from services.environment.chat.messages import normalised_tools
from services.environment.programs.tools import methods_of
from services.environment.programs.worker import reason_of
from services.verifiers.sandbox.loaded import Unusable, imported


def main() -> None:
    """Print the tools of the environment on standard input."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the code prints is no answer
    try:
        found = {"tools": normalised_tools(shared_tools(json.load(sys.stdin)))}
    except BaseException as error:  # whatever the code raises is reported to the user
        found = {"error": str(error) if isinstance(error, Unusable) else reason_of(error)}
    with os.fdopen(answers, "w") as out:
        json.dump(found, out)


def shared_tools(environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of an environment in OpenAI's form; an agent names its own in each call."""
    return class_tools(imported(environment["function"])) if environment["kind"] == "python" else []


def class_tools(program: Any) -> list[dict[str, Any]]:
    """Return the tools that a class lists as its attribute `tools`. No object of it is initialised."""
    listed = getattr(program, "tools", ())
    if not inspect.isclass(program) or not isinstance(listed, list | tuple):  # such as a property: each object has its own
        return []
    return [tool.described for tool in methods_of(object.__new__(program), cast("list[Any]", listed)).values()]


if __name__ == "__main__":
    main()
