"""A worker process: scores groups of completions until its pool is gone.

Waits for: a frame from the pool. Unblocked by: the pool, or its death (end of the stream; during a call the worker's own alarm
ends it).
Guarantees: no call exceeds its verifier's limit, since the kernel's timer ends the process even inside a C loop that never
returns to Python; memory is limited, and under memory pressure this process is killed first. Once its verifiers are built it
can reach no network, start no program, touch no other process, and write only to its scratch folder (confine.py, as far as the
kernel supports it).

Run as `python -m services.generator.verifiers.sandbox.worker FD SCRATCH`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TypeVar

import msgspec
from pydantic import TypeAdapter

from services.config.data import Source, VerifierConfig
from services.generator.verifiers.base import Verifier
from services.generator.verifiers.registry import build
from services.generator.verifiers.sandbox.confine import confine, limit_resources
from services.generator.verifiers.sandbox.frames import LENGTH, Hello, Job, Setup, Verdict, frame

PARENT_CHECK_S = 2.0
"""Seconds between an idle worker's checks that its parent is alive, in case a copy of the pool's socket outlives the parent."""

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
    try:
        verifiers = _build(setup)
    except Exception as error:  # any reason that keeps a verifier from starting is reported to the pool, and to the user
        pool.sendall(frame(Hello(_reason(error))))
        return
    confine(scratch)  # from here on it reads text that models wrote
    pool.sendall(frame(Hello()))
    while (job := _receive(pool, Job, parent)) is not None:
        for verifier, limit_s in verifiers[job.source]:
            verdict = _judge(verifier, limit_s, job)
            pool.sendall(frame(verdict))
            if verdict.error:
                break


def _protect() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the generator, which then closes its pool
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    limit_resources()
    logging.disable(logging.WARNING)  # math-verify warns that its own time limit is off; ours replaces it
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")


def _build(setup: Setup) -> dict[str, list[tuple[Verifier, float]]]:
    """Map each source to its verifiers with the time limit of a call."""
    sources = TypeAdapter(list[Source]).validate_python(setup.sources)
    configs = [VerifierConfig.model_validate(config) for config in setup.verifiers]
    return {
        source.name: [(build(config, source), config.timeout_s) for config in configs if config.scores(source.name)]
        for source in sources
    }


def _judge(verifier: Verifier, limit_s: float, job: Job) -> Verdict:
    """Return the scores of the group, or the error of the first call that failed."""
    scores = []
    try:
        for completion in job.completions:
            score = _timed(limit_s, verifier, completion, job.answer)
            if not (math.isfinite(score) and 0 <= score <= 1):
                return Verdict([], f"score {score} is not between 0 and 1")
            scores.append(score)
    except Exception as error:  # anything that a verifier raises is its failure, reported with the reason
        return Verdict([], _reason(error))
    return Verdict(scores)


def _timed(limit_s: float, verifier: Verifier, completion: str, answer: str) -> float:
    """Return the verifier's score. Past the limit SIGALRM, with its default action, ends the process."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return verifier.score(completion, answer)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _receive(pool: socket.socket, kind: type[T], parent: int) -> T | None:
    """Return the next frame, or None if the pool is gone."""
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


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    main()
