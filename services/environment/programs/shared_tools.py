"""The tools that an environment offers in all of its rollouts, so that its groups' prompts can have them.

Run as `python -m services.environment.programs.shared_tools` with the environment's configuration as JSON on standard input: a
separate process, since the code is not ours. Prints a JSON object with `tools`, or with `error`. Tools that an object of the
class sets for its row are not among them: the environment pod puts those into the rollout's own context.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from services.chat.messages import normalised_tools
from services.environment.programs.frames import setup_of
from services.environment.programs.kinds import opened
from services.environment.programs.loaded import BadReply
from services.runtime.own_code import Unusable, reason_of


def main() -> None:
    """Print the tools of the environment on standard input."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the code prints is not part of the answer
    try:
        found = {"tools": normalised_tools(asyncio.run(shared_tools(json.load(sys.stdin))))}
    except BaseException as error:  # whatever the code raises is reported to the user
        found = {"error": str(error) if isinstance(error, Unusable | BadReply) else reason_of(error)}
    with os.fdopen(answers, "w") as out:
        json.dump(found, out)


async def shared_tools(environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of an environment in OpenAI's form; an agent names its own in each call."""
    kind = await opened(setup_of(environment))
    try:
        return kind.shared_tools()
    finally:
        await kind.close()


if __name__ == "__main__":
    main()
