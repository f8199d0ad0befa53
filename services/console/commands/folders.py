"""Implements `grpo ls` and `grpo logs`, which read only run folders: a run may be running, stopped or killed.

Guarantees: no server is started and no lock is kept; text of logs cannot move the cursor.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.paths import RunPaths, existing
from services.console.printable import columns, print_json, printable, safe_json
from services.console.run import conditions
from services.operations import figures

POLL_S = 0.2  # between polls of followed logs
TAIL_BYTES = 64 * 1024  # of a file of records, which holds more than its last line
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Listed:
    """A run on this machine."""

    run: str
    state: str
    """running | paused | stopped | finished | failed."""
    steps: int
    of: int
    reward: float | None
    """Mean reward of its last step."""
    changed_s: float
    """When its folder last changed, in seconds since 1970."""
    folder: str


def ls(folder: Path, as_json: bool) -> int:
    """List the runs below a folder, the newest last. One that cannot be read is named on standard error, and left out."""
    found = list[Listed]()
    for path in folder.glob("*/config.toml"):
        try:
            found.append(_listed(path.parent))
        except (OSError, ValueError, TypeError, KeyError, ConsoleError) as error:
            said = str(error) if isinstance(error, ConsoleError) else f"{path.parent} cannot be read: {error}"
            print(printable(said), file=sys.stderr)
    found.sort(key=lambda run: run.changed_s)
    if as_json:
        print_json({"runs": [asdict(run) for run in found]})
    elif not found:
        print(f"no runs in {folder}: start one with grpo run")
    else:
        _show(found)
    return EXIT_OK


def logs(run: str, service: str, lines: int, follow: bool, as_json: bool = False) -> int:
    """Print the last lines of a run's logs, and then new lines."""
    folder = existing(run)
    files = _files(folder, service)
    width = -1 if as_json else max(len(file.stem) for file in files)
    ends: dict[Path, int] = {}
    for file in files:
        text, ends[file] = _tail(file, lines)
        _say(file, text, width, len(files) > 1)
    while follow:
        time.sleep(POLL_S)
        for file in _files(folder, service):
            text, ends[file] = _added(file, ends.get(file, 0))
            _say(file, text, width, len(files) > 1)
    return EXIT_OK


def _listed(path: Path) -> Listed:
    folder = RunPaths(path)
    said = folder.told("run")
    last = _last_record(folder.metrics)
    changed = max(file.stat().st_mtime for file in (folder.config, folder.metrics, folder.summary) if file.exists())
    reward = last.get(figures.REWARD)
    return Listed(
        said["name"], conditions.of(folder).word, int(last.get("step", -1)) + 1, said["steps"], reward, changed, str(path)
    )


def _last_record(file: Path) -> dict[str, float]:
    """Return the last whole line of a file of records; {} without one."""
    for line in reversed(_tail_bytes(file).splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    return {}


def _tail_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as body:
            body.seek(max(0, os.fstat(body.fileno()).st_size - TAIL_BYTES))
            return body.read()
    except OSError:
        return b""


def _files(folder: RunPaths, service: str) -> list[Path]:
    """Return the logs of the services whose name begins with `service`. Raise `ConsoleError` if there are none."""
    files = sorted(folder.logs.glob("*.log"))
    chosen = [file for file in files if file.stem.startswith(service)]
    if not chosen:
        names = ", ".join(file.stem for file in files) or "none yet"
        raise ConsoleError(f"no log of {service or 'any service'!r} in {folder.logs}: choose from {names}", EXIT_CONFIG)
    return chosen


def _tail(file: Path, lines: int) -> tuple[bytes, int]:
    """Return the last lines of a file, and where it ends."""
    with file.open("rb") as body:
        end = position = os.fstat(body.fileno()).st_size
        text = b""
        while position and text.count(b"\n") <= lines:
            size = min(BLOCK_BYTES, position)
            position -= size
            body.seek(position)
            text = body.read(size) + text
    return b"".join(text.splitlines(keepends=True)[-lines:] if lines else []), end


def _added(file: Path, start: int) -> tuple[bytes, int]:
    """Return the whole lines after `start`, and where they end. A file that became shorter is read from its beginning."""
    with file.open("rb") as body:
        body.seek(start if os.fstat(body.fileno()).st_size >= start else 0)
        begun = body.tell()
        text = body.read(BLOCK_BYTES)
    whole = text.rfind(b"\n") + 1 if len(text) < BLOCK_BYTES else len(text)
    return text[:whole], begun + whole


def _say(file: Path, text: bytes, width: int, named: bool) -> None:
    for line in _lines(text):
        if width < 0:
            print(safe_json(json.dumps({"service": file.stem, "line": line}, ensure_ascii=False)), flush=True)
            continue
        print(f"{file.stem:<{width}}  {line}" if named else line, flush=True)


def _lines(text: bytes) -> Iterator[str]:
    for line in text.decode("utf-8", "replace").splitlines():
        yield printable(line)


def _show(found: Sequence[Listed]) -> None:
    rows = [("run", "state", "steps", "reward", "changed", "folder")]
    for run in found:
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed_s))
        reward = "–" if run.reward is None else f"{run.reward:.3f}"
        rows.append((run.run, run.state, f"{run.steps}/{run.of}", reward, changed, run.folder))
    print(columns(rows, right=(2, 3)))
