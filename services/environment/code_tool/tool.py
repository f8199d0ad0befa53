"""The tool `python` of one rollout: runs code that the policy writes in a process of its own, in a folder that lasts as long.

Guarantees: a call ends within its time limit with a text of bounded length; when it has ended, no process of it is left, and its
folder is within its limits. The folder and its processes are named after the rollout, and go with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from services.environment.code_tool import folder, runner
from services.environment.programs.tools import Callee, shortened
from services.runtime.own_code import Unusable
from services.verifiers.sandbox.scratch import remove

OUTPUT_BYTES = 1 << 20
"""Most output of a call; with more, it is ended."""
SHOWN_CHARACTERS = 10_000
FOLDER_BYTES, FOLDER_ENTRIES = 64 << 20, 10_000
FULL = f"the working directory may have {FOLDER_BYTES >> 20} MiB and {FOLDER_ENTRIES} entries; it was emptied"
LOOK_S = 0.1  # between looks at how full the folder is
DESCRIBED = (
    "Run Python code and return what it prints, and the value of its last expression. Files in the working directory are kept "
    "between calls, variables are not. There is no network."
)
_ROOT = Path(__file__).resolve().parents[3]
_at_once = asyncio.Semaphore(os.cpu_count() or 1)


class CodeTool:
    """The tool `python` of one rollout."""

    name = "python"

    def __init__(self, rollout: str, limit_s: float, memory_mib: int) -> None:
        """`rollout` names it, and is part of the names of its folder and processes."""
        self._rollout, self._limit_s, self._memory = rollout, limit_s, memory_mib << 20
        self._folder = Path.cwd() / f"code-{rollout}"
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    @property
    def described(self) -> dict[str, Any]:
        """Return it as chat templates take it: a JSON schema in OpenAI's form."""
        schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
        return {"type": "function", "function": {"name": self.name, "description": DESCRIBED, "parameters": schema}}

    @property
    def tools(self) -> Sequence[Callee]:
        """Return the tool."""
        return [self]

    async def call(self, arguments: object) -> str:
        """Return what the code prints, or what is wrong."""
        code = cast("dict[str, Any]", arguments).get("code") if isinstance(arguments, dict) else None
        if not isinstance(code, str):
            return "Error: code: Field required" if code is None else "Error: code: Input should be a valid string"
        async with _at_once:
            if self._closed:
                return "Error: the rollout has ended"
            self._folder.mkdir(mode=0o700, exist_ok=True)
            return await self._run(code)

    async def _run(self, code: str) -> str:
        variables = {"HOME": ".", "TMPDIR": ".", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-B", runner.__file__, str(_ROOT), str(os.getpid()), str(self._memory),
            str(int(self._limit_s) + 1), f"code-{self._rollout}", env=variables, cwd=self._folder,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        fault = ""
        reading = asyncio.ensure_future(_output(process, code.encode("utf-8", "replace")))
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait([reading, watching], timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                fault = FULL
            elif not reading.done():
                fault = f"the code ran longer than {self._limit_s:g} s"
        finally:
            watching.cancel()
            _kill(process)
            output, cut = await reading
            status = await process.wait()
        if await asyncio.to_thread(folder.over, self._folder, FOLDER_BYTES, FOLDER_ENTRIES):
            fault = FULL
            await asyncio.to_thread(remove, self._folder)
        if status == runner.UNCONFINED:
            raise Unusable('tools = ["python"] needs a kernel with seccomp and Landlock (Linux 5.13, not switched off)')
        if cut and not fault:
            fault = f"the code printed more than {OUTPUT_BYTES >> 20} MiB"
        if status < 0 and not fault:
            fault = f"the code was killed by {signal.Signals(-status).name}, perhaps for its memory or its processor time"
        said = shortened(output.decode(errors="replace").rstrip(), SHOWN_CHARACTERS)
        return "\n".join(filter(None, [said, f"Error: {fault}" if fault else ""]))

    async def _watch(self) -> None:
        """End when the folder has grown too large."""
        while not await asyncio.to_thread(folder.over, self._folder, FOLDER_BYTES, FOLDER_ENTRIES):
            await asyncio.sleep(LOOK_S)

    def snapshot(self) -> Any:
        """Return the files, or None if there are too many of them."""
        return folder.packed(self._folder) if self._folder.exists() else {}

    def restore(self, state: Any) -> None:
        """Write the files of a snapshot."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        folder.unpack(self._folder, state)

    async def close(self) -> None:
        """End the code, if it runs, and delete the folder."""
        self._closed = True
        if self._process is not None:
            _kill(self._process)
            await self._process.wait()
        await asyncio.to_thread(remove, self._folder)


async def _output(process: asyncio.subprocess.Process, code: bytes) -> tuple[bytes, bool]:
    """Give a process its code; return the beginning of what it prints, and whether it was ended for printing too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(code)
        process.stdin.close()
    kept, size = bytearray(), 0
    while data := await process.stdout.read(1 << 16):  # to the end, even of a killed one: otherwise asyncio does not see it
        size += len(data)
        kept += data[: max(0, 4 * SHOWN_CHARACTERS - len(kept))]
        if size > OUTPUT_BYTES:
            _kill(process)
    return bytes(kept), size > OUTPUT_BYTES


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # Popen.kill may take the exit status, so that asyncio does not find it
