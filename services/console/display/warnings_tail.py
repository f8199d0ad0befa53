"""Reads warnings and errors from the pods' JSON logs as they are written.

Guarantees: each poll reads only the lines appended since the last one, at most the last `POLL_BYTES` per pod. Warnings of vLLM
and other libraries, of which a healthy run has dozens, are left to the log; their errors are not.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from services.console.printable import printable
from services.runtime.exits import one_line

POLL_BYTES = 256 * 1024
SHOWN = 160  # characters of a warning; its log has the rest
LEVELS = ("warning", "error", "critical")
NOISY = ("vllm", "py.warnings", "DeepSpeed", "transformers", "torch")  # loggers whose warnings tell an operator nothing


class _Event(msgspec.Struct):
    event: str
    level: str = ""
    error: str = ""
    logger: str = ""


class WarningsTail:
    """Follows every `*.log` in a folder, from its current end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {path: path.stat().st_size for path in folder.glob("*.log")}

    def poll(self) -> list[str]:
        """Return the new warnings as lines `pod: event: error`."""
        return [line for path in sorted(self._folder.glob("*.log")) for line in self._poll_file(path)]

    def _poll_file(self, path: Path) -> list[str]:
        start, end = self._read.get(path, 0), path.stat().st_size
        if end <= start:
            return []
        with path.open("rb") as file:
            file.seek(max(start, end - POLL_BYTES))
            chunk = file.read(POLL_BYTES)
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._read[path] = max(start, end - POLL_BYTES) + len(whole)
        return [f"{path.stem}: {text}" for line in whole.splitlines() if (text := _warning(line))]


def _warning(line: bytes) -> str:
    if not line.startswith(b"{"):
        return ""
    try:
        event = msgspec.json.decode(line, type=_Event)
    except msgspec.DecodeError:
        return ""
    if event.level not in LEVELS or (event.level == "warning" and event.logger.startswith(NOISY)):
        return ""
    text = printable(one_line(f"{event.event}: {event.error}" if event.error else event.event))
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
