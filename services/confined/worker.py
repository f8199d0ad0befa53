"""The handle of one worker process: starts it in a scratch folder of its own, exchanges frames with it, ends it.

Guarantees: a process that is ended, for whatever reason, is killed and reaped, and its folder deleted; under a guard this
includes everything that it has started. It inherits no variables that look like secrets except those that `Launch` names.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from services.confined import guard
from services.confined.frames import BadFrame, frame, read_frame
from services.confined.scratch import Scratch

START_LIMIT_S = 120.0
"""Limit of a worker's start, which takes seconds on an idle machine and tens of seconds while a model loads."""
REAP_LIMIT_S, GUARD_LIMIT_S = 1.0, 10.0
"""A process that has closed its socket exits within milliseconds, and a guard ends its worker within milliseconds; past these
limits they are killed."""
_SECRET = re.compile("^GRPO_|PASSWORD|SECRET|TOKEN$|_KEY$|CREDENTIAL")
"""Environment variables that a worker does not inherit."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that no proxy is meant for: the endpoints of agents are there."""
_SERVICES = Path(__file__).resolve().parents[1]

T = TypeVar("T")
LOST = (TimeoutError, EOFError, OSError, BadFrame)
"""What `exchange` and `receive` raise if the process does not answer, has ended or sends garbage."""


class NotStarted(Exception):
    """A process could not be started, or did not answer its first frame; the text says how, after the process' name."""


@dataclass(frozen=True)
class Launch:
    """How a worker process is started."""

    module: str
    """Run as `python -m MODULE FD SCRATCH`: the descriptor of its socket, and its folder."""
    inherited: Collection[str] = ()
    """Environment variables that it gets although they look like secrets."""
    withheld: Collection[str] = ()
    """Environment variables that it does not get although they look harmless."""
    interpreter: str = ""
    """The Python that runs it; empty: the one that runs this."""
    guarded: bool = False
    """Whether it may start processes, which then end with it."""
    prints: bool = False
    """Whether its standard output is shown."""


class ConfinedWorker:
    """A process that can be started again."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._scratch: Scratch | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._clearing: asyncio.Future[None] | None = None  # the last process that was ended, while it is reaped

    @property
    def pid(self) -> int | None:
        """Process id, or None if there is no process."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    async def start(self, setup: object, hello: type[T]) -> T:
        """End an earlier process, start one, and return the answer to its first frame. Raises `NotStarted`."""
        await self.kill()
        try:
            ours = self._launched()
        except OSError as error:  # no space, no descriptors, or no further processes
            await self.kill()
            raise NotStarted(f"cannot be started: {error}") from None
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            async with asyncio.timeout(START_LIMIT_S):
                return await self.exchange(setup, hello)
        except LOST as error:
            raise NotStarted(f"did not start ({await self.end(error)}); see its output above") from None
        except BaseException:  # also cancellation: its first frame would be taken for the answer to another
            await self.kill()
            raise

    async def exchange(self, message: object, kind: type[T]) -> T:
        """Send a message and return the next one. Raises `LOST`."""
        self.post(message)
        assert self._writer is not None, "the worker was started"
        await self._writer.drain()
        return await self.receive(kind)

    def post(self, message: object) -> None:
        """Send a message, without waiting. Raises TypeError and ValueError for what cannot be encoded."""
        assert self._writer is not None, "the worker was started"
        self._writer.write(frame(message))

    async def receive(self, kind: type[T]) -> T:
        """Return the next message. Raises `LOST`."""
        assert self._reader is not None, "the worker was started"
        return await read_frame(self._reader, kind)

    def kill(self) -> asyncio.Future[None]:
        """End the process, if any; return a future that is done once it, and any that an earlier call ended, has been reaped.

        It is reaped even if nobody awaits the future, the caller is cancelled, or the event loop is closed meanwhile.
        """
        process, writer, scratch = self._process, self._writer, self._scratch
        self._process = self._reader = self._writer = self._scratch = None  # another may be started meanwhile
        if writer is not None:
            writer.close()
        if process is not None:
            process.terminate() if self._launch.guarded else process.kill()
        if process is not None or scratch is not None:
            # Not a task, which would be cancelled before it begins if the loop is closed now.
            self._clearing = asyncio.get_running_loop().run_in_executor(None, _clear, process, scratch)
        if self._clearing is None:
            self._clearing = asyncio.get_running_loop().create_future()
            self._clearing.set_result(None)
        return asyncio.shield(self._clearing)

    async def end(self, error: BaseException) -> str:
        """End the process after an error, one of `LOST`, and return how it ended, in words."""
        process, code = self._process, None
        try:
            if process is not None and not isinstance(error, TimeoutError | BadFrame):
                code = await asyncio.to_thread(_wait, process)
        finally:
            await self.kill()
        if process is None:
            return "killed"
        if isinstance(error, BadFrame):
            return f"the worker wrote garbage to its pool and was killed ({error})"
        if code is None:
            return "the worker did not answer and was killed"
        if code in (-signal.SIGALRM, -signal.SIGPROF):
            return "a call exceeded its time limit and its worker was killed"
        return f"the worker died, {_signal_name(-code) if code < 0 else f'exit status {code}'}"

    def _launched(self) -> socket.socket:
        """Start the process; return this side's end of its socket."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._scratch = Scratch()
                self._process = self._spawn(theirs.fileno(), self._scratch.path)
        except BaseException:  # also Ctrl-C: nobody else would close it
            ours.close()
            raise
        return ours

    def _spawn(self, descriptor: int, scratch: Path) -> subprocess.Popen[bytes]:
        launch = self._launch
        variables = worker_environment(scratch, launch.inherited, launch.withheld)
        python, variables = in_interpreter(launch.interpreter, scratch, variables)
        return subprocess.Popen(
            [*(guard.guarded() if launch.guarded else ()), python, "-m", launch.module, str(descriptor), str(scratch)],
            env=variables,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=None if launch.prints else subprocess.DEVNULL,
            process_group=0,  # keeps Ctrl-C at the terminal from reaching it
        )


def worker_environment(scratch: Path, kept: Collection[str], withheld: Collection[str] = ()) -> dict[str, str]:
    """Return the environment variables of a process that runs code that is not ours: no secrets except those in `kept`."""
    path = os.pathsep.join(filter(None, [str(_SERVICES.parent), os.environ.get("PYTHONPATH", "")]))
    single_threaded = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    secret = {name for name in os.environ if name in withheld or _SECRET.search(name)} - {*kept}
    inherited = {name: value for name, value in os.environ.items() if name not in secret}
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")), *LOOPBACK]))
    own = {"PYTHONPATH": path, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": direct, "no_proxy": direct}
    return {**inherited, **single_threaded, **own}


def in_interpreter(interpreter: str, folder: Path, variables: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the Python to start and its environment variables; `interpreter` empty: the one that runs this.

    Another one sees only this package of this one's libraries, through a link in `folder`.
    """
    if not interpreter:
        return sys.executable, dict(variables)
    package = folder / "package"
    package.mkdir(exist_ok=True)
    if not (package / "services").exists():
        (package / "services").symlink_to(_SERVICES)
    return interpreter, {**variables, "PYTHONPATH": str(package)}


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(REAP_LIMIT_S)
    except subprocess.TimeoutExpired:
        return None


def _clear(process: subprocess.Popen[bytes] | None, scratch: Scratch | None) -> None:
    """Wait for a process that was killed, or for a guard that was told to exit, then delete its folder."""
    if process is not None:
        try:
            process.wait(GUARD_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if scratch is not None:
        scratch.remove()


def _signal_name(number: int) -> str:
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"{signal.Signals(number).name}{hint}"
