"""A worker process: scores groups of completions until its pool exits.

Waits for: a frame from the pool. Unblocked by: the pool, or its death (end of the stream; during a call the worker's own alarm
ends it).
Guarantees: no call exceeds its verifier's limit, since the kernel's timer ends the process even inside a C loop that never
returns to Python; memory is limited, and under memory pressure this process is killed first. Once its verifiers are built it
can start no process, touch no other process, write only to its scratch folder and, unless its verifiers may, reach no network
(confine.py, as far as the kernel supports it).

Run as `python -m services.verifiers.worker FD SCRATCH`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import TypeAdapter

from services.config.data import Source
from services.config.verifiers import VERIFIER
from services.confined.confine import confine, limit_resources
from services.confined.frames import LENGTH, frame
from services.runtime.own_code import Unusable, reason_of
from services.verifiers.base import Hello, Job, Setup
from services.verifiers.loaded import LoadedVerifier, load
from services.verifiers.results import BadResult, Verdict

PARENT_CHECK_S = 2.0
"""Seconds between an idle worker's checks that its parent is alive, in case a copy of the pool's socket outlives the parent."""

MEMORY = "4 GiB of address space"
REFUSED = "the sandbox refuses processes, files elsewhere and, without network = true, sockets (docs/rewards.md)"

T = TypeVar("T")


def main() -> None:
    """Serve the socket whose descriptor is the first argument; the second is this process' own folder."""
    scratch = Path(sys.argv[2])
    _protect()
    os.chdir(scratch)
    with socket.socket(fileno=int(sys.argv[1])) as pool, contextlib.suppress(ConnectionError):
        pool.settimeout(PARENT_CHECK_S)
        _serve(pool, os.getppid(), scratch)


def _serve(pool: socket.socket, parent: int, scratch: Path) -> None:
    setup = _receive(pool, Setup, parent)
    if setup is None:
        return
    limit_resources(setup.memory_bytes)
    with asyncio.Runner() as runner:
        try:
            verifiers = _build(setup)
            if any(verifier.is_async for listed in verifiers.values() for verifier in listed):
                runner.get_loop()  # it opens sockets
        except Unusable as error:
            pool.sendall(frame(Hello(str(error))))
            return
        if not setup.prints:
            _silence()
        confine(scratch, setup.network)  # from here on it reads text that models wrote
        needs = {name: sorted({need for one in listed for need in one.needs}) for name, listed in verifiers.items()}
        pool.sendall(frame(Hello(needs=needs)))
        while (job := _receive(pool, Job, parent)) is not None:
            for verifier in verifiers[job.source]:
                verdict = _judge(verifier, job, runner.run)
                pool.sendall(frame(verdict))
                if verdict.error:
                    break


def _protect() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the generator, which then closes its pool
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    logging.disable(logging.WARNING)  # math-verify warns that its own time limit is off; ours replaces it
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")


def _silence() -> None:
    """Discard the output of verifiers: there may be a line for every completion."""
    with open(os.devnull, "w") as nothing:
        for descriptor in (1, 2):
            os.dup2(nothing.fileno(), descriptor)


def _build(setup: Setup) -> dict[str, list[LoadedVerifier]]:
    """Map each source to its verifiers. Raises `Unusable`."""
    sources = TypeAdapter(list[Source]).validate_python(setup.sources)
    configs = [(name, VERIFIER.validate_python(given)) for name, given in setup.verifiers]
    found: dict[str, list[LoadedVerifier]] = {source.name: [] for source in sources}
    for name, config in configs:
        try:
            own = load(config) if config.kind == "python" else None  # once, whatever the number of sources: it may be costly
            for source in sources:
                if config.scores(source.name):
                    found[source.name].append(LoadedVerifier(config, source, own, setup.max_tokens))
        except BaseException as error:  # whatever its code raises is reported to the pool, and to the user
            reason = str(error) if isinstance(error, Unusable) else reason_of(error)
            raise Unusable(f"verifier {name!r} cannot be used: {reason}") from error
    return found


def _judge(verifier: LoadedVerifier, job: Job, run: Callable[[Any], Any]) -> Verdict:
    """Return the verdict on the group, or the error of the first call that failed."""
    try:
        return verifier.score(job, run)
    except BadResult as error:
        return Verdict([], error=str(error))
    except BaseException as error:  # anything that a verifier raises is its failure, reported with the reason
        return Verdict([], error=_reason(error))


def _receive(pool: socket.socket, kind: type[T], parent: int) -> T | None:
    """Return the next frame, or None if the pool has exited."""
    head = _exactly(pool, LENGTH.size, parent)
    body = head and _exactly(pool, LENGTH.unpack(head)[0], parent)
    return msgspec.msgpack.decode(body, type=kind) if body else None


def _exactly(pool: socket.socket, size: int, parent: int) -> bytes | None:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        try:
            count = pool.recv_into(view[filled:])
        except TimeoutError:
            if os.getppid() != parent:
                return None
            continue
        except ConnectionError:
            return None
        if count == 0:
            return None
        filled += count
    return bytes(data)


def _reason(error: BaseException) -> str:
    """Return what was raised, and what to change if the sandbox refused it."""
    if isinstance(error, MemoryError):
        return f'{reason_of(error)}: its worker may use {MEMORY}; for more, run it as a service (kind = "http")'
    if isinstance(error, OSError) and _refused(error):
        return f"{reason_of(error)}: {REFUSED}"
    return reason_of(error)


def _refused(error: BaseException) -> bool:
    """Return whether the kernel denied a right; libraries wrap the error that says so."""
    inner = getattr(error, "reason", None) or error.__cause__ or error.__context__
    return isinstance(error, PermissionError) or (isinstance(inner, BaseException) and inner is not error and _refused(inner))


if __name__ == "__main__":
    main()
