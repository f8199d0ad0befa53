"""The pod's handle of one worker process: starts it, has it perform the steps of rollouts' programs, ends it.

Guarantees: a step ends with its value or with `ProgramFailed`. A step that takes too long is stopped; its process is ended only
if its code blocks, so that the step cannot be stopped. A rollout whose process was ended because of another one gets
`ProcessLost`. A process that was ended leaves no process and no folder behind.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from typing import Any

import msgspec

from services.config import RunConfig
from services.config.environments import EnvironmentConfig
from services.confined.frames import BadFrame
from services.confined.worker import ConfinedWorker, Launch, NotStarted
from services.environment.programs.frames import ProgramStep, Started, StepDone, as_json, setup_of
from services.protocol.messages import Row

PROBE_LIMIT_S = 120.0
"""Seconds for an interpreter to import what a worker needs."""
STOP_LIMIT_S = 5.0
"""Seconds for a process to answer that a step has stopped; after that, its code is blocking it."""
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
        self._setup = setup_of(environment.model_dump())
        self.rollouts = 0
        launch = Launch(
            "services.environment.programs.worker", environment.inherited, interpreter=environment.interpreter, guarded=True
        )
        self._worker = ConfinedWorker(launch)
        self._reading: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._programs: set[str] = set()  # rollouts whose programs are in this process
        self._waiting: dict[int, asyncio.Future[StepDone]] = {}
        self._numbers = itertools.count()

    @property
    def pid(self) -> int | None:
        """Process id, or None if there is no process."""
        return self._worker.pid

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
            started = await self._worker.start(self._setup, Started)
        except NotStarted as error:
            fault = await asyncio.to_thread(_fault_of, self._environment.interpreter)
            why = f"did not start: {fault}" if fault else str(error)
            raise ProgramUnusable(f"a worker of environment {self._environment.name!r} {why}") from None
        if started.error:
            await self._worker.kill()
            raise ProgramUnusable(f"environment {self._environment.name!r} cannot be used: {started.error}")
        self._reading = asyncio.create_task(self._read())

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
        if self.alive and rollout in self._programs:
            self._programs.discard(rollout)
            self._worker.post(ProgramStep(next(self._numbers), rollout, "close"))

    def kill(self) -> asyncio.Future[Any]:
        """End the process, if any, also one that is starting; everything that waits for it fails.

        Return a future that is done once the process has been reaped, which happens even if nobody awaits it.
        """
        starting = [self._starting] if self._starting is not None else []
        for each in starting:
            each.cancel()
        return asyncio.gather(self._end("was ended", suspected=False), *starting, return_exceptions=True)

    def _send(self, step: ProgramStep) -> asyncio.Future[StepDone]:
        """Return the answer to a step. Raises TypeError and ValueError for what cannot be encoded."""
        self._worker.post(step)
        answer = self._waiting[step.id] = asyncio.get_running_loop().create_future()
        return answer

    def _end(self, why: str, suspected: bool = True) -> asyncio.Future[None]:
        """End the process, if any; `suspected`: a step running in it may be the cause. Return a future as `kill` does."""
        reading, self._reading = self._reading, None  # another process may be started meanwhile
        self._programs.clear()
        if reading is not None and reading is not asyncio.current_task():
            reading.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ProcessLost(f"its worker process {why}", suspected))
                answer.exception()  # marks it as retrieved: perhaps nobody waits
        return self._worker.kill()

    async def _read(self) -> None:
        why = "died"
        try:
            while True:
                done = await self._worker.receive(StepDone)
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


def row_for(row: str, answer: str) -> dict[str, Any]:
    """Return a ticket's encoded `Row` as programs receive it: its columns, `prompt` (messages) and `answer`.

    Raises `msgspec.DecodeError`.
    """
    found = msgspec.json.decode(row, type=Row)
    return {**found.columns, "prompt": found.messages, "answer": answer}


def _fault_of(interpreter: str) -> str:
    """Return why no worker can run in another interpreter, or "" if it has what every worker needs."""
    if not interpreter:
        return ""
    try:
        done = subprocess.run([interpreter, "-c", f"import {', '.join(NEEDED)}"], capture_output=True, timeout=PROBE_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as missing:
        return f"interpreter = {interpreter!r} cannot be run ({missing}): make it with python -m venv, or correct the path"
    if done.returncode:
        return f"interpreter = {interpreter!r} lacks what every worker needs: run {interpreter} -m pip install {' '.join(NEEDED)}"
    return ""
