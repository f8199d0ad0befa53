"""A worker process: runs the programs of many rollouts until its pod is gone.

Waits for: a frame from the pod. Unblocked by: the pod, or the end of the stream.
Guarantees: whatever a program raises is its rollout's failure, reported with the line; an async program never keeps others from
running, a sync one only during its own calls. What programs print goes to the pod's log folder.

Run as `python -m services.environment.programs.worker FD SCRATCH`.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from services.environment.programs.frames import ProgramSetup, ProgramStep, Started, StepDone
from services.environment.programs.kinds import Kind, opened
from services.environment.programs.loaded import BadReply, LoadedProgram
from services.runtime.own_code import Unusable
from services.verifiers.sandbox.frames import LENGTH, frame

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
        kind = await opened(setup)
    except BaseException as error:  # whatever its code raises is reported to the pod, and to the user
        writer.write(frame(Started(str(error) if isinstance(error, Unusable | BadReply) else reason_of(error))))
        await writer.drain()
        return
    worker = ProgramWorker(kind)
    writer.write(frame(Started()))
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

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
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
            agent = self._agents[step.rollout] = asyncio.ensure_future(self._kind.run(step.given))
            return await agent
        if step.do == "close":
            if agent := self._agents.pop(step.rollout, None):
                agent.cancel()
            program = self._programs.pop(step.rollout, None)
            return await program.close() if program else None
        if step.do in ("start", "restore"):
            self._programs[step.rollout] = self._kind.program(step.rollout)
        action: Callable[[Any], Any] = getattr(self._programs[step.rollout], step.do)
        return await action(step.given)


def reason_of(error: BaseException) -> str:
    """Return what was raised and in which line, since its traceback is not shown."""
    text = f"{type(error).__name__}: {error}"[:500]
    own = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OURS)]
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else text


if __name__ == "__main__":
    main()
