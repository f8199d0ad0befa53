"""An agent that is a separate program: started once per rollout in its own folder, and ended with the rollout.

The program finds the policy at OPENAI_BASE_URL with OPENAI_API_KEY (and ANTHROPIC_BASE_URL with ANTHROPIC_API_KEY), its data row
as JSON in the file GRPO_ROW_FILE and, unless it is too long for a variable, in GRPO_ROW, and prints its reward as the last line
of its output: a number, or a JSON object of numbers with the key `score`.

Guarantees: when the program or the rollout has ended, so have all processes that it started, and its folder is deleted; only the
end of its output is kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.confined import guard
from services.confined.scratch import remove
from services.environment.programs.loaded import BadReply

log = logging.getLogger(__name__)

ERROR = re.compile(r"\s*[\w.]*(?:Error|Exception)\b.*:")
"""Start of the line in which an interpreter says why a program failed."""
TAIL_BYTES = 1 << 16
VARIABLE_BYTES = 100_000
"""Longest row in a variable: the kernel takes no variable of more than 128 KiB."""


async def run_command(command: Sequence[str], given: dict[str, Any]) -> Any:
    """Run the program for one rollout and return its last line, decoded. Raises `BadReply`."""
    folder = Path(tempfile.mkdtemp(prefix="agent-", dir=os.getcwd()))
    try:
        status, output, errors = await _ended(command, folder, given)
    finally:
        await asyncio.shield(asyncio.to_thread(_delete, folder))
    last = _last_line(output)
    if status:
        raise BadReply(f"{command[0]} exited with status {status}: {_why(errors)[:500] or 'it printed no error'}")
    if not last:
        return None
    try:
        return json.loads(last)
    except (ValueError, RecursionError):
        raise BadReply(f"{command[0]} printed {last[:200]!r} last: print the reward, a number, as the last line") from None


def _delete(folder: Path) -> None:
    """Delete the folder of a program, which may hold files of another user."""
    try:
        remove(folder)
    except OSError as error:  # no reason to lose a reward
        log.warning("the folder of an agent stays until its worker ends: %s", error)


async def _ended(command: Sequence[str], folder: Path, given: dict[str, Any]) -> tuple[int, bytes, bytes]:
    """Run the program to its end; return its exit status and the ends of its output and its errors."""
    row, work = folder / "row.json", folder / "work"
    row.write_text(json.dumps(given["row"], default=str))
    work.mkdir()
    process = await asyncio.create_subprocess_exec(
        *guard.guarded(),
        *command,
        env={**os.environ, **_variables(given, row, work)},
        cwd=work,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    tails = asyncio.gather(_tail(process.stdout), _tail(process.stderr))  # read to the end: otherwise asyncio does not see it
    try:
        output, errors = await asyncio.shield(tails)
        return await process.wait(), output, errors
    finally:
        if process.returncode is None:
            process.terminate()  # the guard, which ends the others
            await asyncio.shield(asyncio.gather(tails, process.wait()))


def _variables(given: dict[str, Any], row: Path, work: Path) -> dict[str, str]:
    url, text = given["url"], row.read_text()
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": given["key"],
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": given["key"],
        "GRPO_ROW_FILE": str(row),
        "TMPDIR": str(work),
        **({"GRPO_ROW": text} if len(text) <= VARIABLE_BYTES else {}),
    }


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Read to the end, and return the end of it."""
    kept = b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-TAIL_BYTES:]
    return kept


def _why(errors: bytes) -> str:
    """Return the last line that names an error, or else the last one: Node.js ends with its version."""
    named = [line.strip() for line in errors.decode(errors="replace").splitlines() if ERROR.match(line)]
    return named[-1] if named else _last_line(errors)


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
