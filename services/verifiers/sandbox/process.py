"""The pool's handle of one worker process: starts it, has it score a group, ends it.

Guarantees: every exchange ends within its limit, with scores or with a `VerifierFailure`. After a failure the process is dead and
reaped, and its scratch folder deleted. There is one exchange at a time. The process inherits no secrets from the environment.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from services.config.verifiers import VerifierConfig
from services.verifiers.base import Job, VerifierFailure
from services.verifiers.results import Verdict, fault_of
from services.verifiers.sandbox.frames import BadFrame, Hello, Setup, frame, read_frame
from services.verifiers.sandbox.scratch import Scratch

START_LIMIT_S = 120.0
"""Limit of a worker's start, which takes seconds on an idle machine and tens of seconds while a model loads."""
GRACE_S = 5.0
"""A worker ends itself at a call's limit. If it does not, because it is stopped or stuck, it is killed this much later."""
REAP_LIMIT_S = 1.0
"""A process that has closed its socket exits within milliseconds; past this limit it is killed."""
_SECRET = re.compile("^GRPO_|PASSWORD|SECRET|TOKEN$|_KEY$|CREDENTIAL")
"""Environment variables that a worker does not inherit."""
_ROOT = Path(__file__).resolve().parents[3]

T = TypeVar("T")


class WorkerProcess:
    """A process that can be restarted.

    `verifiers`: source -> its verifiers by name. `inherited`: environment variables that it gets although they look like secrets;
    `withheld`: others that it does not get.
    """

    def __init__(
        self, setup: Setup, verifiers: Mapping[str, Sequence[tuple[str, VerifierConfig]]], inherited: Collection[str] = (),
        withheld: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._setup, self._verifiers, self._inherited, self._withheld = setup, verifiers, inherited, withheld
        self.needs: dict[str, list[str]] = {}
        """Source -> fields of a group that its verifiers request, once started."""
        self._scratch: Scratch | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Process id, or None if there is no process."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start the process and wait until it is warm. Raises `VerifierFailure`."""
        await self.kill()
        try:
            ours = self._launch()
        except OSError as error:  # no space, no descriptors, or no further processes
            await self.kill()
            raise VerifierFailure(f"a verifier worker cannot be started: {error}") from None
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            async with asyncio.timeout(START_LIMIT_S):
                await self._send(self._setup)
                hello = await self._receive(Hello)
        except (TimeoutError, EOFError, ConnectionError, BadFrame) as error:
            raise VerifierFailure(f"a verifier worker did not start ({await self._end(error)}); see its output above") from None
        except BaseException:  # also cancellation: its first frame would be taken for the answer to a group
            await self.kill()
            raise
        if hello.error:
            await self.kill()
            raise VerifierFailure(hello.error)
        self.needs = hello.needs

    def _launch(self) -> socket.socket:
        """Start the process; return this side's end of its socket."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._scratch = Scratch()
                scratch = str(self._scratch.path)
                self._process = _spawn(theirs.fileno(), scratch, self._setup.prints, self._inherited, self._withheld)
        except BaseException:
            ours.close()
            raise
        return ours

    async def score(self, job: Job) -> dict[str, Verdict]:
        """Return verifier -> its verdict on a group. Raises `VerifierFailure`. Cancelling the call kills the process."""
        verdicts: dict[str, Verdict] = {}
        fault = ""
        verifiers, count = self._verifiers[job.source], len(job.completions)
        allowed_s = sum(verifier.timeout_s for _, verifier in verifiers) * count + GRACE_S
        try:
            async with asyncio.timeout(allowed_s):
                await self._send(job)
                for name, verifier in verifiers:
                    verdict = await self._receive(Verdict)
                    verdicts[name] = verdict
                    if found := verdict.error or fault_of(verdict, count, verifier.bounds):
                        fault = fault or f"verifier {name!r} failed: {found}"
                    if verdict.error:  # the worker has ended the group
                        break
        except (TimeoutError, EOFError, ConnectionError, BadFrame) as error:
            name, verifier = verifiers[min(len(verdicts), len(verifiers) - 1)]
            raise VerifierFailure(f"verifier {name!r}, timeout_s = {verifier.timeout_s:g}: {await self._end(error)}") from None
        except BaseException:  # also cancellation: its answer to this group would be taken for the next group's
            await self.kill()
            raise
        if fault:
            raise VerifierFailure(fault)
        return verdicts

    async def kill(self) -> None:
        """End the process, if any, and reap it, even if the caller is cancelled meanwhile."""
        process, writer, scratch = self._process, self._writer, self._scratch
        self._process = self._reader = self._writer = self._scratch = None
        if writer is not None:
            writer.close()
        if process is not None:
            process.kill()
        if process is not None or scratch is not None:
            await asyncio.shield(asyncio.to_thread(_clear, process, scratch))

    async def _end(self, error: Exception) -> str:
        """End the process and return how it ended, in words."""
        process = self._process
        if process is None:
            return "killed"
        code = None
        if isinstance(error, BadFrame):
            await self.kill()
            return f"the worker wrote garbage to its pool and was killed ({error})"
        if not isinstance(error, TimeoutError):
            code = await asyncio.to_thread(_wait, process)
        await self.kill()
        if code is None:
            return "the worker did not answer and was killed"
        if code == -signal.SIGALRM:
            return "a call exceeded its time limit and its worker was killed"
        return f"the worker died, {_signal_name(-code) if code < 0 else f'exit status {code}'}"

    async def _send(self, message: object) -> None:
        assert self._writer is not None, "the worker was not started"
        self._writer.write(frame(message))
        await self._writer.drain()

    async def _receive(self, kind: type[T]) -> T:
        assert self._reader is not None, "the worker was not started"
        return await read_frame(self._reader, kind)


def _spawn(
    descriptor: int, scratch: str, prints: bool, kept: Collection[str], withheld: Collection[str] = ()
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.verifiers.sandbox.worker", str(descriptor), scratch],
        env=worker_environment(scratch, kept, withheld),
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=None if prints else subprocess.DEVNULL,
        process_group=0,  # keeps Ctrl-C at the terminal from reaching it
    )


def worker_environment(scratch: str, kept: Collection[str], withheld: Collection[str] = ()) -> dict[str, str]:
    """Return the environment variables of a process that runs code that is not ours: no secrets except those in `kept`."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    single_threaded = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    secret = {name for name in os.environ if name in withheld or _SECRET.search(name)} - {*kept}
    inherited = {name: value for name, value in os.environ.items() if name not in secret}
    return {**inherited, **single_threaded, "PYTHONPATH": path, "TMPDIR": scratch, "PYTHONDONTWRITEBYTECODE": "1"}


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(REAP_LIMIT_S)
    except subprocess.TimeoutExpired:
        return None


def _clear(process: subprocess.Popen[bytes] | None, scratch: Scratch | None) -> None:
    """Wait for a process that was killed, then delete its folder."""
    if process is not None:
        process.wait()
    if scratch is not None:
        scratch.remove()


def _signal_name(number: int) -> str:
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"{signal.Signals(number).name}{hint}"
