"""Why a process ended: its exit code, the kernel's count of processes killed for memory, and the error in its log, as one line.

Guarantees: a message that only points elsewhere ("see root cause above") gives way to the one it points to; a message of several
lines becomes one; without any error the answer is empty.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_REDIS = 0, 1, 2, 3
"""Exit codes of a service, by which a supervisor knows whether a restart would help."""
EXIT_UNLOADED = 128 + signal.SIGTERM  # asked to end before any work had begun
COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Files with a line `oom_kill N`: of the container, and of the machine, which has no such file of its own."""
OUT_OF_MEMORY = (
    "memory ran out and the kernel killed a process; use a smaller model or lora.rank, or lower trainer.row_tokens, "
    "generator.count, generator.engine_options.kv_cache_memory_bytes or generator.max_num_seqs"
)
ERROR_PREFIX = "error: "  # prefix of the line in which a service reports the error that ended it (services/http/entry.py)
LONGEST = 400  # characters of a cause
VAGUE = re.compile(
    r"root cause above|see its log|see the (log|stack trace)|EngineDeadError|engine core (proc )?died|died unexpectedly|"
    r"Engine core initialization failed|connection (closed|reset) by|"
    r"^\S*(ChildFailedError|CalledProcessError|SystemExit|KeyboardInterrupt)\b",
    re.IGNORECASE,
)
"""Messages that say that something failed, but not what."""
_PREFIX = re.compile(r"^\(?\w+ pid=\d+\)?:? ?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )?|^\[rank\d+\]: ?")
_EXCEPTION = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: (.*))?$")
_VALIDATION = re.compile(r"\d+ validation errors? for \w+")
_TYPE = re.compile(r" \[type=\w+.*$")


class _LoggedError(msgspec.Struct):
    event: str = ""
    error: str = ""
    exception: str = ""
    level: str = ""


def cause(text: str) -> str:
    """Return why a process ended that logged `text`.

    It is the service's last report if that names the failure, else the last other error that does.
    """
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    reported = [one_line(error) for error in _reported(lines)]
    found = [one_line(error) for error in _found(lines)]
    telling = [error for error in (*found, *reported) if error and not VAGUE.search(error)]
    told = [error for error in reported if error in telling]
    return next((errors[-1] for errors in (told, telling, reported, found) if errors), "")


def most_telling(causes: Iterable[str]) -> str:
    """Return the first cause that says what failed, else the first."""
    given = [each for each in causes if each]
    return next((each for each in given if not VAGUE.search(each)), given[0] if given else "")


def one_line(message: str) -> str:
    """Return a message of several lines as one of at most `LONGEST` characters. Of pydantic's messages, only the fault is
    kept."""
    lines = message.splitlines()
    begun = next((i for i, line in enumerate(lines) if _VALIDATION.search(line)), None)
    if begun is not None:
        wrong = [_TYPE.sub("", line).strip() for line in lines[begun + 1 :] if not line.strip().startswith("For further")]
        head = _VALIDATION.sub("", lines[begun]).strip().removesuffix(":")
        lines = [f"{head}: " if head else "", *(line.removeprefix("Value error, ") for line in wrong)]
    short = " ".join(" ".join(lines).split())
    return short if len(short) <= LONGEST else f"{short[: LONGEST - 1]}…"


def _reported(lines: Sequence[str]) -> Iterator[str]:
    """Yield the errors with which a service reports its end."""
    for at, line in enumerate(lines):
        if line.startswith(ERROR_PREFIX):
            yield "\n".join([line.removeprefix(ERROR_PREFIX), *_indented(lines, at + 1)])


def _found(lines: Sequence[str]) -> Iterator[str]:
    """Yield the errors that end tracebacks and those that are logged, in order, except those of finalizers (harmless)."""
    for at, line in enumerate(lines):
        if line.startswith("{"):
            yield from _logged(line)
        elif line.startswith("Traceback (most recent call last)") and not (
            at and lines[at - 1].startswith("Exception ignored in")
        ):
            end = at + 1
            while end < len(lines) and (lines[end].startswith(" ") or not lines[end]):
                end += 1
            if end < len(lines) and _EXCEPTION.match(lines[end]):
                yield "\n".join([lines[end], *_indented(lines, end + 1)])


def _indented(lines: Sequence[str], at: int) -> Iterator[str]:
    """Yield the indented lines from `at` on: the rest of a message."""
    return takewhile(lambda line: line.startswith("  "), lines[at:])


def _logged(line: str) -> Iterator[str]:
    """Yield the errors of a JSON line at level error: of its traceback, or else its text."""
    try:
        event = msgspec.json.decode(line, type=_LoggedError)
    except msgspec.MsgspecError:
        return
    if event.level not in ("error", "critical"):
        return
    inside = [error for text in (event.exception, event.event) for error in _found(text.splitlines())]
    yield from inside or [": ".join(part for part in (event.event, event.error) if part)]


def oom_kills() -> int:
    """Return how many processes the kernel has killed here because memory ran out, 0 if it does not say."""
    for path in COUNTERS:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0
