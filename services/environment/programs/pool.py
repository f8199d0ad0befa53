"""The worker processes of one environment, as the pod sees them.

Guarantees: a step ends with its value or with `ProgramFailed`; one that takes too long ends its process, and with it the programs
of other rollouts there; a process that has died is replaced before the next rollout is given to it. No process outlives the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec

from services.config.environments import (
    AgentEnvironment,
    EnvironmentConfig,
    McpEnvironment,
    ToolEnvironment,
    code_of,
)
from services.environment.programs import guard
from services.environment.programs.frames import ProgramSetup, ProgramStep, Started, StepDone
from services.verifiers.sandbox.frames import LENGTH, REPLY_BYTES, frame
from services.verifiers.sandbox.interpreters import in_interpreter, inherited
from services.verifiers.sandbox.process import worker_environment
from services.verifiers.sandbox.scratch import Scratch, sweep

START_LIMIT_S = 120.0
REAP_LIMIT_S = 10.0
"""A guard ends its worker within milliseconds; past this limit it is killed."""
NEEDED = ("msgspec", "pydantic")
"""Libraries that a worker needs in the virtual environment that it runs in, besides those of its environment's kind."""


class ProgramFailed(Exception):
    """A rollout's program raised, hung, died or returned something that is no reply."""


class ProgramUnusable(Exception):
    """An environment's code cannot be loaded."""


class ProgramProcess:
    """One process, which can be started again."""

    def __init__(self, environment: EnvironmentConfig) -> None:
        self._environment = environment
        self._setup = setup_of(environment)
        self.rollouts = 0
        self._scratch: Scratch | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[StepDone]] = {}
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id, or None if there is no process."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the process runs and is read from."""
        return self._process is not None and self._writer is not None  # `_read` sees its end, without a system call each time

    async def ensure(self) -> None:
        """Start the process unless it runs. Raises `ProgramUnusable`."""
        async with self._starting:
            if not self.alive:
                await self._start()

    async def _start(self) -> None:
        await self.kill("was restarted")
        ours, theirs = socket.socketpair()
        self._scratch = Scratch()
        with theirs:
            self._process = _spawn(self._environment, theirs.fileno(), self._scratch.path)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                self._writer.write(frame(self._setup))
                started = msgspec.msgpack.decode(await _read(reader), type=Started)
        except (TimeoutError, EOFError, ConnectionError, ValueError) as error:
            await self.kill("did not start")
            why = _why_not(self._environment.interpreter, error)
            raise ProgramUnusable(f"a worker of environment {self._environment.name!r} did not start: {why}") from None
        if started.error:
            await self.kill("could not be used")
            raise ProgramUnusable(f"environment {self._environment.name!r} cannot be used: {started.error}")
        self._reading = asyncio.create_task(self._read(reader))

    async def do(self, rollout: str, what: str, given: Any = None) -> StepDone:
        """Have a rollout's program do something. Raises `ProgramFailed`."""
        if not self.alive or self._writer is None:
            raise ProgramFailed("its worker process has died")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        limit_s = self._environment.timeout_s
        try:
            self._writer.write(frame(ProgramStep(number, rollout, what, given)))
            async with asyncio.timeout(None if what == "run" else limit_s):  # an agent's time is watched by its rollout
                done = await answer
        except TimeoutError:
            await self.kill(f"was killed, since {what} took longer than timeout_s = {limit_s:g}")
            raise ProgramFailed(f"{what} took longer than timeout_s = {limit_s:g}") from None
        except (TypeError, ConnectionError) as error:
            raise ProgramFailed(f"{what}: {error}") from None
        finally:
            self._waiting.pop(number, None)
        if done.error:
            raise ProgramFailed(f"{what}: {done.error}")
        return done

    def drop(self, rollout: str) -> None:
        """Have a rollout's program end, without waiting for it."""
        if self.alive and self._writer is not None:
            self._writer.write(frame(ProgramStep(next(self._numbers), rollout, "close")))

    async def kill(self, why: str = "was ended") -> None:
        """End the process, if any, and reap it; everything that waits for it fails."""
        process, writer, reading = self._process, self._writer, self._reading
        self._process = self._writer = self._reading = None
        if reading is not None and reading is not asyncio.current_task():
            reading.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ProgramFailed(f"its worker process {why}"))
        if writer is not None:
            writer.close()
        if process is not None:
            process.terminate()
            await asyncio.to_thread(_reap, process)
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "died"
        try:
            while True:
                done = msgspec.msgpack.decode(await _read(reader), type=StepDone)
                answer = self._waiting.get(done.id)
                if answer is not None and not answer.done():
                    answer.set_result(done)
        except (EOFError, ConnectionError):
            pass
        except ValueError as error:
            why = f"wrote garbage and was killed ({error})"
        await self.kill(why)


class ProgramPool:
    """The processes of one environment."""

    def __init__(self, environment: EnvironmentConfig) -> None:
        self.environment = environment
        self.processes = [ProgramProcess(environment) for _ in range(environment.processes)]

    async def start(self) -> None:
        """Start all processes, after deleting what those of killed pods left behind. Raises `ProgramUnusable`."""
        await asyncio.to_thread(sweep)
        await asyncio.gather(*(process.ensure() for process in self.processes))

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncGenerator[ProgramProcess]:
        """Give the process with the fewest rollouts, started again if it has died. Raises `ProgramFailed`."""
        process = min(self.processes, key=lambda each: each.rollouts)
        process.rollouts += 1
        try:
            try:
                await process.ensure()
            except ProgramUnusable as error:
                raise ProgramFailed(str(error)) from None
            yield process
        finally:
            process.rollouts -= 1

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(process.kill() for process in self.processes))


def setup_of(environment: EnvironmentConfig) -> ProgramSetup:
    """Return what a worker needs of its environment's configuration."""
    setup = ProgramSetup(environment.kind, code_of(environment), environment.options)
    if isinstance(environment, AgentEnvironment | McpEnvironment):
        setup.command = environment.command
    if isinstance(environment, ToolEnvironment):
        setup.tools, setup.tool_timeout_s = list(environment.tools), environment.tool_timeout_s
        setup.memory_mib = environment.memory_mib
    if isinstance(environment, McpEnvironment):
        setup.url, setup.shared, setup.token_env = environment.url, environment.shared, environment.token_env
    return setup


def _spawn(environment: EnvironmentConfig, descriptor: int, scratch: Path) -> subprocess.Popen[bytes]:
    """Start a worker under a guard, which ends whatever it has started."""
    variables = worker_environment(str(scratch), inherited(environment))
    python, variables = in_interpreter(environment.interpreter, scratch, variables)
    return subprocess.Popen(
        [
            sys.executable, "-I", "-S", guard.__file__, str(os.getpid()),
            python, "-m", "services.environment.programs.worker", str(descriptor), str(scratch),
        ],
        env=variables, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        process_group=0,  # keeps Ctrl-C from reaching it
    )  # fmt: skip


def _why_not(interpreter: str, error: Exception) -> str:
    """Return why a worker did not start, as far as its interpreter tells."""
    if not interpreter:
        return f"{error!r}; see its output above"
    try:
        done = subprocess.run([interpreter, "-c", f"import {', '.join(NEEDED)}"], capture_output=True, timeout=START_LIMIT_S)
    except OSError as missing:
        return (
            f"interpreter = {interpreter!r} cannot be run ({missing.strerror}): make it with python -m venv, or correct the path"
        )
    if done.returncode:
        return f"interpreter = {interpreter!r} lacks what every worker needs: run {interpreter} -m pip install {' '.join(NEEDED)}"
    return f"{error!r}; see its output above"


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a guard that was told to end, and for what it ends."""
    try:
        process.wait(REAP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > REPLY_BYTES:
        raise ValueError(f"a frame of {length} bytes, more than {REPLY_BYTES}")
    return await reader.readexactly(length)
