"""A worker process: runs the programs of many rollouts until its pod exits.

Waits for: a frame from the pod. Unblocked by: the pod, or the end of the stream.
Guarantees: whatever a program raises is its rollout's failure, reported with the line; an async program never keeps others from
running, a sync one only during its own calls. What programs print is discarded; their standard error is the pod's.

Run as `python -m services.environment.programs.worker FD SCRATCH`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from services.confined.frames import LENGTH, REPLY_BYTES, frame
from services.environment.programs.frames import ProgramSetup, ProgramStep, Started, StepDone, as_json
from services.environment.programs.kind import Kind
from services.environment.programs.kinds import opened
from services.environment.programs.loaded import BadReply, LoadedProgram
from services.environment.programs.tools import shortened
from services.runtime.own_code import Unusable, reason_of

THREADS = 512
"""Threads of `asyncio.to_thread`, which agents that block wait in: with Python's default of a few per processor, the wait for one
would count as their rollouts' time. One that is stopped keeps its thread until its function returns."""
WHY_CHARACTERS = 1000
"""Maximum length of the reason why a step failed."""


def main() -> None:
    """Serve the socket whose descriptor is the first argument; the second is this process' own folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pod, which then ends this process
    os.chdir(sys.argv[2])
    with asyncio.Runner() as runner, contextlib.suppress(EOFError, ConnectionError):
        loop = runner.get_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS))
        serving = loop.create_task(_serve(socket.socket(fileno=int(sys.argv[1]))))
        while not serving.done():
            with contextlib.suppress(SystemExit):  # of a task that a program began: it ends only that task
                loop.run_until_complete(serving)


async def _serve(pod: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=pod)
    setup = msgspec.msgpack.decode(await _frame(reader), type=ProgramSetup)
    try:
        kind = await opened(setup)
    except BaseException as error:  # whatever its code raises is reported to the pod, and to the user
        writer.write(frame(Started(str(error) if isinstance(error, Unusable | BadReply) else reason_of(error))))
        await writer.drain()
        return
    worker = ProgramWorker(kind)
    writer.write(frame(Started()))
    try:
        while True:
            worker.begin(msgspec.msgpack.decode(await _frame(reader), type=ProgramStep), writer)
    finally:
        with contextlib.suppress(Exception):  # nobody is left to report it to
            await kind.close()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


class ProgramWorker:
    """The programs of this process, by rollout."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._programs: dict[str, LoadedProgram] = {}
        self._steps: dict[str, set[asyncio.Task[None]]] = {}  # under way, by rollout

    def begin(self, step: ProgramStep, writer: asyncio.StreamWriter) -> None:
        """Start a step. `stop` and `close` first end the rollout's current one."""
        if step.do in ("stop", "close"):
            for task in self._steps.get(step.rollout, ()):
                task.cancel()
        task = asyncio.create_task(self._answer(step, writer))
        self._steps.setdefault(step.rollout, set()).add(task)
        task.add_done_callback(lambda done: self._ended(step, done, writer))

    def _ended(self, step: ProgramStep, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        if task.cancelled():  # before it could begin
            writer.write(frame(StepDone(step.id, error="stopped")))
        self._steps[step.rollout].discard(task)
        if not self._steps[step.rollout]:
            del self._steps[step.rollout]

    async def _answer(self, step: ProgramStep, writer: asyncio.StreamWriter) -> None:
        """Perform a step and send its result."""
        started = time.monotonic()
        try:
            done = StepDone(step.id, await self._do(step))
            done.seconds = time.monotonic() - started
            data = _encoded(done)
        except BaseException as error:  # anything that a program raises is its failure, reported with the reason
            why = str(error) if isinstance(error, BadReply) else reason_of(error)
            data = frame(StepDone(step.id, error=_told(why), seconds=time.monotonic() - started))
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    async def _do(self, step: ProgramStep) -> Any:
        given = json.loads(step.given)
        match step.do:
            case "stop":
                return None
            case "run":
                return await self._kind.run(given)
            case "rows":
                return await self._kind.rows(**given)
            case "close":
                program = self._programs.pop(step.rollout, None)
                return await program.close() if program else None
            case "start" | "restore":
                self._programs[step.rollout] = self._kind.program(step.rollout)
            case _:
                pass
        action: Callable[[Any], Any] = getattr(self._programs[step.rollout], step.do)
        return await action(given)


def _encoded(done: StepDone) -> bytes:
    """Return the frame of an answer. Raises `BadReply` for one that is too large."""
    text = as_json(done.value)
    try:
        data = frame(StepDone(done.id, text, seconds=done.seconds))
    except UnicodeEncodeError:  # a lone surrogate, which models write and programs repeat
        data = frame(StepDone(done.id, _sayable(text), seconds=done.seconds))
    if len(data) - LENGTH.size > REPLY_BYTES:
        raise BadReply(f"the reply has {len(data)} bytes, more than {REPLY_BYTES}")
    return data


def _told(why: str) -> str:
    """Return a reason of bounded length: the pod would end a worker whose answer is too long, and fail its other rollouts."""
    return _sayable(shortened(why, WHY_CHARACTERS))


def _sayable(text: str) -> str:
    """Return a text without lone surrogates."""
    return text.encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main()
