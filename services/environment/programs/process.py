"""The pod's handle of one worker process: starts it, has it perform the steps of rollouts' programs, ends it.

Guarantees: a step ends with its value or with `ProgramFailed`. A step that takes too long is stopped; its process is ended only
if its code blocks, so that the step cannot be stopped. A rollout whose process was ended because of another one gets
`ProcessLost`. A process that was ended leaves no process and no folder behind.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
from pathlib import Path
from typing import Any

from services.config import RunConfig
from services.config.environments import (
    AgentEnvironment,
    EnvironmentConfig,
    McpEnvironment,
    ToolEnvironment,
    VerifiersEnvironment,
    code_of,
)
from services.environment.programs.frames import ProgramSetup, ProgramStep, Started, StepDone, as_json
from services.verifiers.sandbox import guard
from services.verifiers.sandbox.frames import BadFrame, frame, read_frame
from services.verifiers.sandbox.interpreters import in_interpreter, inherited
from services.verifiers.sandbox.process import worker_environment
from services.verifiers.sandbox.scratch import Scratch

START_LIMIT_S = 120.0
STOP_LIMIT_S = 5.0
"""Seconds for a process to answer that a step has stopped; after that, its code is blocking it."""
REAP_LIMIT_S = 10.0
"""A guard ends its worker within milliseconds; past this limit it is killed."""
NEEDED = ("msgspec", "pydantic")
"""Libraries that a worker needs in its virtual environment, besides those of its environment's kind."""
BEGINNINGS = ("start", "restore", "run", "rows")
"""Steps that begin a program; the others need one that was begun in the same process."""


class ProgramFailed(Exception):
    """A rollout's program raised, hung, died or returned something that is not a reply."""


class ProcessLost(ProgramFailed):
    """The process of a rollout's program has ended, and the program with it."""

    def __init__(self, message: str, suspected: bool = False) -> None:
        """`suspected`: the rollout was performing a step then, which may be the cause."""
        super().__init__(message)
        self.suspected = suspected


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
        self._starting: asyncio.Task[None] | None = None
        self._programs: set[str] = set()  # rollouts whose programs are in this process
        self._waiting: dict[int, asyncio.Future[StepDone]] = {}
        self._numbers = itertools.count()

    @property
    def pid(self) -> int | None:
        """Process id, or None if there is no process."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the process has started and is read from; `_read` sees its end, without a system call each time."""
        return self._reading is not None

    async def ensure(self) -> None:
        """Start the process unless it is running. All waiters for a start share its outcome. Raises `ProgramUnusable`."""
        if self.alive:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be that nobody waits
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self._end("was restarted")
        try:
            ours, theirs = socket.socketpair()
            self._scratch = Scratch()
            with theirs:
                self._process = _spawn(self._environment, theirs.fileno(), self._scratch.path)
            reader, self._writer = await asyncio.open_connection(sock=ours)
            async with asyncio.timeout(START_LIMIT_S):
                self._writer.write(frame(self._setup))
                started = await read_frame(reader, Started)
        except (TimeoutError, EOFError, OSError, ValueError) as error:
            await self._end("did not start")
            why = await asyncio.to_thread(_why_not, self._environment.interpreter, error)
            raise ProgramUnusable(f"a worker of environment {self._environment.name!r} did not start: {why}") from None
        except BaseException:
            await self._end("was not wanted")
            raise
        if started.error:
            await self._end("could not be used")
            raise ProgramUnusable(f"environment {self._environment.name!r} cannot be used: {started.error}")
        self._reading = asyncio.create_task(self._read(reader))

    async def do(self, rollout: str, what: str, given: Any = None) -> StepDone:
        """Have a rollout's program do something. Raises `ProgramFailed`."""
        if not self.alive or (what not in BEGINNINGS and rollout not in self._programs):
            raise ProcessLost(f"{what}: its worker process has ended")
        self._programs.add(rollout)
        limit_s = None if what == "run" else self._environment.timeout_s  # an agent's time is watched by its rollout
        number = next(self._numbers)
        try:
            answer = self._send(ProgramStep(number, rollout, what, as_json(given)))
            async with asyncio.timeout(limit_s):
                done = await answer
            done.value = json.loads(done.value) if isinstance(done.value, str) else None
        except TimeoutError:
            why = f"{what} took longer than timeout_s = {limit_s:g}"
            self._waiting.pop(number, None)
            await self.stop(rollout, why)
            raise ProgramFailed(why) from None
        except (TypeError, ValueError, RecursionError) as error:  # its input or output is not JSON
            raise ProgramFailed(f"{what}: {error}") from None
        finally:
            self._waiting.pop(number, None)
        if done.error:
            raise ProgramFailed(f"{what}: {done.error}")
        return done

    async def stop(self, rollout: str, why: str) -> None:
        """Stop the current step of a rollout's program.

        A process that does not answer is ended, with `why` as the error of the others.
        """
        if not self.alive:
            return
        number = next(self._numbers)
        answer = self._send(ProgramStep(number, rollout, "stop"))
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await answer
        except TimeoutError:
            await self._end(f"was killed, since another rollout's {why}", suspected=False)
        except ProgramFailed:  # it has ended meanwhile
            pass
        finally:
            self._waiting.pop(number, None)

    def drop(self, rollout: str) -> None:
        """Have a rollout's program end, without waiting for it."""
        if self.alive and self._writer is not None and rollout in self._programs:
            self._programs.discard(rollout)
            self._writer.write(frame(ProgramStep(next(self._numbers), rollout, "close")))

    async def kill(self) -> None:
        """End the process, if any, and reap it; everything that waits for it fails."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._end("was ended", suspected=False)

    def _send(self, step: ProgramStep) -> asyncio.Future[StepDone]:
        """Return the answer to a step. Raises TypeError and ValueError for what cannot be encoded."""
        assert self._writer is not None, "the process is alive"
        self._writer.write(frame(step))
        answer = self._waiting[step.id] = asyncio.get_running_loop().create_future()
        return answer

    async def _end(self, why: str, suspected: bool = True) -> None:
        """End the process, if any; `suspected`: a step running in it may be the cause."""
        process, writer, reading, scratch = self._process, self._writer, self._reading, self._scratch
        self._process = self._writer = self._reading = self._scratch = None  # another may be started meanwhile
        self._programs.clear()
        if reading is not None and reading is not asyncio.current_task():
            reading.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ProcessLost(f"its worker process {why}", suspected))
                answer.exception()  # marks it as retrieved: perhaps nobody waits
        if writer is not None:
            writer.close()
        if process is not None:
            process.terminate()
        if process is not None or scratch is not None:
            await asyncio.shield(asyncio.to_thread(_clear, process, scratch))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "died"
        try:
            while True:
                done = await read_frame(reader, StepDone)
                answer = self._waiting.get(done.id)
                if answer is not None and not answer.done():
                    answer.set_result(done)
        except (EOFError, ConnectionError):
            pass
        except BadFrame as error:
            why = f"wrote garbage and was killed ({error})"
        await self._end(why)


def check_reward(scores: object, truncated: bool, source: str, config: RunConfig) -> None:
    """Raise `ProgramFailed` for a rollout of a prompt source without a reward: neither its program nor a verifier gives one.

    A rollout that a limit ended may have none: it counts as 0.
    """
    if scores is None and not truncated and not config.verified(source):
        raise ProgramFailed(f'the rollout has no reward: its program gave none, and no verifier scores source "{source}"')


def setup_of(environment: EnvironmentConfig) -> ProgramSetup:
    """Return the part of its environment's configuration that a worker needs."""
    setup = ProgramSetup(environment.kind, code_of(environment), environment.options, timeout_s=environment.timeout_s)
    if isinstance(environment, AgentEnvironment | McpEnvironment):
        setup.command = environment.command
    if isinstance(environment, VerifiersEnvironment):
        setup.environment, setup.max_turns = environment.id, environment.max_turns
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
            *guard.guarded(),
            python, "-m", "services.environment.programs.worker", str(descriptor), str(scratch),
        ],
        env=variables, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        process_group=0,  # keeps Ctrl-C from reaching it
    )  # fmt: skip


def _why_not(interpreter: str, error: Exception) -> str:
    """Return why a worker did not start, as far as its interpreter's output shows."""
    if not interpreter:
        return f"{error!r}; see its output above"
    try:
        done = subprocess.run([interpreter, "-c", f"import {', '.join(NEEDED)}"], capture_output=True, timeout=START_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as missing:
        return f"interpreter = {interpreter!r} cannot be run ({missing}): make it with python -m venv, or correct the path"
    if done.returncode:
        return f"interpreter = {interpreter!r} lacks what every worker needs: run {interpreter} -m pip install {' '.join(NEEDED)}"
    return f"{error!r}; see its output above"


def _clear(process: subprocess.Popen[bytes] | None, scratch: Scratch | None) -> None:
    """Wait for a guard that was told to exit, and for the processes it kills; then delete its worker's folder."""
    if process is not None:
        try:
            process.wait(REAP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if scratch is not None:
        scratch.remove()
