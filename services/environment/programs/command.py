"""An agent that is a program of its own: started once per rollout, ended with it.

The program finds the policy at OPENAI_BASE_URL with OPENAI_API_KEY (and ANTHROPIC_BASE_URL with ANTHROPIC_API_KEY), its data row
as JSON in GRPO_ROW, and prints its reward as the last line of its output: a number, or a JSON object of numbers with the key
`score`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

from services.environment.programs.loaded import BadReply
from services.runtime.process_tools import die_with_parent

OUTPUT_BYTES = 1 << 20


async def run_command(command: Sequence[str], given: dict[str, Any]) -> Any:
    """Run the program for one rollout and return what it printed last, decoded. Raises `BadReply`."""
    url = given["url"]
    variables = {
        "OPENAI_BASE_URL": url, "OPENAI_API_KEY": given["key"], "GRPO_ROW": json.dumps(given["row"], default=str),
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": given["key"],
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **variables}, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, limit=OUTPUT_BYTES, start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        output, errors = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has started
    last = _last_line(output)
    if process.returncode:
        raise BadReply(f"{command[0]} ended with exit status {process.returncode}: {_last_line(errors) or 'it printed no error'}")
    if not last:
        return None
    try:
        return json.loads(last)
    except ValueError:
        raise BadReply(f"{command[0]} printed {last[:200]!r} last: print the reward, a number, as the last line") from None


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else ""
