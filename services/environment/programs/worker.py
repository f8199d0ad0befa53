"""A worker process: runs the programs of many rollouts until its pod is gone.

Waits for: a frame from the pod. Unblocked by: the pod, or the end of the stream.
Guarantees: whatever a program raises is its rollout's failure, reported with the line; an async program never keeps others from
running, a sync one only during its own calls. What programs print goes to the pod's log folder.

Run as `python -m services.environment.programs.worker FD SCRATCH`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from services.environment.programs.command import run_command
from services.environment.programs.frames import ProgramSetup, ProgramStep, Started, StepDone
from services.environment.programs.loaded import BadReply, LoadedProgram, scores_of
from services.verifiers.sandbox.frames import LENGTH, frame
from services.verifiers.sandbox.loaded import Unusable, imported

_OURS = str(Path(__file__).resolve().parents[3] / "services")


def main() -> None:
    """Serve the socket whose descriptor is the first argument; the second is this process' own folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pod, which then ends this process
    os.chdir(sys.argv[2])
    with contextlib.suppress(EOFError, ConnectionError):
        asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))


async def _serve(pod: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=pod)
    setup = msgspec.msgpack.decode(await _frame(reader), type=ProgramSetup)
    try:
        worker = ProgramWorker(setup)
    except BaseException as error:  # whatever its code raises is reported to the pod, and to the user
        writer.write(frame(Started(str(error) if isinstance(error, Unusable) else reason_of(error))))
        await writer.drain()
        return
    writer.write(frame(Started(restorable=worker.restorable)))
    running: set[asyncio.Task[None]] = set()
    while True:
        step = msgspec.msgpack.decode(await _frame(reader), type=ProgramStep)
        task = asyncio.create_task(worker.answer(step, writer))
        running.add(task)
        task.add_done_callback(running.discard)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


class ProgramWorker:
    """The programs of this process, by rollout."""

    def __init__(self, setup: ProgramSetup) -> None:
        self._setup = setup
        self._program: Any = imported(setup.function) if setup.function else None
        if setup.kind == "python" and not inspect.isclass(self._program):
            raise Unusable(f"function = {setup.function!r} is not a class but {type(self._program).__name__}")
        if setup.function and not callable(self._program):
            raise Unusable(f"function = {setup.function!r} is not a function")
        self.restorable = setup.kind == "python" and hasattr(self._program, "restore")
        self._programs: dict[str, LoadedProgram] = {}
        self._agents: dict[str, asyncio.Task[Any]] = {}

    async def answer(self, step: ProgramStep, writer: asyncio.StreamWriter) -> None:
        """Do a step and send what came of it."""
        started = time.monotonic()
        try:
            done = StepDone(step.id, await self._do(step))
            data = frame(done)
        except BadReply as error:
            data = frame(StepDone(step.id, error=str(error)))
        except BaseException as error:  # anything that a program raises is its failure, reported with the reason
            data = frame(StepDone(step.id, error=reason_of(error), seconds=time.monotonic() - started))
        else:
            done.seconds = time.monotonic() - started
            data = frame(done)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    async def _do(self, step: ProgramStep) -> Any:
        if step.do == "run":
            agent = self._agents[step.rollout] = asyncio.ensure_future(self._run_agent(step.given))
            return await agent
        if step.do == "close":
            if agent := self._agents.pop(step.rollout, None):
                agent.cancel()
            program = self._programs.pop(step.rollout, None)
            return await program.close() if program else None
        if step.do in ("start", "restore"):
            self._programs[step.rollout] = LoadedProgram(self._program(**self._setup.options))
        action: Callable[[Any], Any] = getattr(self._programs[step.rollout], step.do)
        return await action(step.given)

    async def _run_agent(self, given: Any) -> dict[str, float] | None:
        """Run an agent with access to the policy; return its reward as `score` and its parts, or None if it gives none."""
        if self._setup.command:
            return scores_of(await run_command(self._setup.command, given))
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=given["url"], api_key=given["key"], max_retries=0, timeout=None) as client:
            said = self._program(client, given["row"], **self._setup.options)
            return scores_of(await said if inspect.isawaitable(said) else said)


def reason_of(error: BaseException) -> str:
    """Return what was raised and in which line, since its traceback is not shown."""
    text = f"{type(error).__name__}: {error}"[:500]
    own = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OURS)]
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else text


if __name__ == "__main__":
    main()
