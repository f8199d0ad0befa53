"""The tool `python` of one rollout: runs code that the policy writes in its own process, in a folder that lasts as long as the
rollout.

Guarantees: a call ends within its time limits, one for the wait for a processor and one for the code, with a text of bounded
length; when it has ended, no process of it is left, and its folder is within its limits. The folder and its processes are named
after the rollout, and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from services.confined import folder
from services.confined.folder import FOLDER_BYTES, FOLDER_ENTRIES
from services.confined.scratch import remove
from services.confined.script import KEPT_BYTES, OUTPUT_BYTES
from services.environment.programs import code_runner
from services.environment.programs.tools import Callee, shortened
from services.runtime.own_code import Unusable
from services.runtime.process_tools import processors

MEMORY_BYTES = 512 << 20  # of the process that runs the code
LOOK_S = 0.1  # between checks of how full the folder is
_ROOT = Path(__file__).resolve().parents[3]
_at_once = asyncio.Semaphore(processors())
SHOWN_CHARACTERS = 10_000
DESCRIBED = (
    "Run Python code and return what it prints, and the value of its last expression. Files in the working directory are kept "
    "between calls, variables are not. There is no network."
)
SLOW, FULL, LOUD = "slow", "full", "loud"
"""Ways in which a call ends, besides signals."""
HINTS = {"SIGKILL": ", perhaps for its memory or its processor time"}  # for others, such as SIGXCPU, the description says it


class PythonTool(ABC):
    """The tool `python` of one rollout. Subclasses decide where the code runs."""

    name = "python"

    @property
    def described(self) -> dict[str, Any]:
        """Return its description for chat templates: a JSON schema in OpenAI's form."""
        schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
        return {"type": "function", "function": {"name": self.name, "description": DESCRIBED, "parameters": schema}}

    @property
    def tools(self) -> Sequence[Callee]:
        """Return the tool."""
        return [self]

    @abstractmethod
    async def call(self, arguments: object) -> str:
        """Return the code's output, or the fault."""


def code_of(arguments: object) -> tuple[str, str]:
    """Return the code of a call, and the fault of its arguments, or ""."""
    code = cast("dict[str, Any]", arguments).get("code") if isinstance(arguments, dict) else None
    if isinstance(code, str):
        return code, ""
    return "", "Error: code: Field required" if code is None else "Error: code: Input should be a valid string"


def told(output: str, fault: str, limit_s: float) -> str:
    """Return the reply to a call: the code's output, and what ended it."""
    meaning = {
        "": "",
        SLOW: f"the code ran longer than {limit_s:g} s",
        FULL: f"the working directory may have {FOLDER_BYTES >> 20} MiB and {FOLDER_ENTRIES} entries, all of them readable; "
        "it was emptied",
        LOUD: f"the code printed more than {OUTPUT_BYTES >> 20} MiB",
    }
    said = meaning[fault] if fault in meaning else f"the code was killed by {_described(fault)}"
    return "\n".join(filter(None, [shortened(output.rstrip(), SHOWN_CHARACTERS), f"Error: {said}" if said else ""]))


def signal_name(number: int) -> str:
    """Return the name of a signal; most real-time signals have none."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


def _described(name: str) -> str:
    known = signal.Signals.__members__.get(name)
    return name if known is None else f"{name} ({signal.strsignal(known)}){HINTS.get(name, '')}"


class CodeTool(PythonTool):
    """Runs the code in a process of this machine."""

    def __init__(self, rollout: str, limit_s: float, wait_limit_s: float | None = None) -> None:
        """`rollout` names it, and is part of the names of its folder and processes; `wait_limit_s`: how long a call may wait
        until calls of other rollouts have ended."""
        self._rollout, self._limit_s = rollout, limit_s
        self._wait_limit_s = wait_limit_s
        self._folder = Path.cwd() / f"code-{rollout}"
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    async def call(self, arguments: object) -> str:
        """Return the code's output, or the fault."""
        code, wrong = code_of(arguments)
        if wrong:
            return wrong
        try:
            async with asyncio.timeout(self._wait_limit_s):
                await _at_once.acquire()
        except TimeoutError:
            return f"Error: not run, since other calls have kept the processors busy for {self._wait_limit_s:g} s: try again"
        try:
            if self._closed:
                return "Error: the rollout has ended"
            self._folder.mkdir(mode=0o700, exist_ok=True)
            return await self._run(code)
        finally:
            _at_once.release()

    async def _run(self, code: str) -> str:
        variables = {"HOME": ".", "TMPDIR": ".", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-B",
            code_runner.__file__,
            str(_ROOT),
            str(os.getpid()),
            str(MEMORY_BYTES),
            str(int(self._limit_s) + 1),
            f"code-{self._rollout}",
            env=variables,
            cwd=self._folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        fault = ""
        reading = asyncio.ensure_future(_output(process, code.encode("utf-8", "replace")))
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait([reading, watching], timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                fault = FULL
            elif not reading.done():
                fault = SLOW
        finally:
            watching.cancel()
            _kill(process)
            output, cut = await reading
            status = await process.wait()
        if await asyncio.to_thread(folder.over, self._folder, FOLDER_BYTES, FOLDER_ENTRIES):
            fault = FULL
            await asyncio.to_thread(remove, self._folder)
        confined = output.startswith(code_runner.CONFINED)
        if status == code_runner.UNCONFINED and not confined:
            raise Unusable(
                'tools = ["python"] needs a kernel with seccomp and Landlock (Linux 5.13, not switched off; '
                "/sys/kernel/security/lsm names landlock), or sandboxes of a cluster (docs/environments.md)"
            )
        if cut and not fault:
            fault = LOUD
        if status < 0 and not fault:
            fault = signal_name(-status)
        return told(output[confined:].decode(errors="replace"), fault, self._limit_s)

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
    """Send a process its code; return the beginning of its output, and whether it was killed for printing too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(code)
        process.stdin.close()
    kept, size = bytearray(), 0
    while data := await process.stdout.read(1 << 16):  # to the end, even of a killed one: otherwise asyncio does not see it
        size += len(data)
        kept += data[: max(0, KEPT_BYTES - len(kept))]
        if size > OUTPUT_BYTES:
            _kill(process)
    return bytes(kept), size > OUTPUT_BYTES


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # Popen.kill may take the exit status, so that asyncio does not find it
