"""Keeps a run going when its output cannot be written, because of a closed pipe (`grpo run … | head`) or a full disk, and notices
every Ctrl-C while it starts.

Guarantees: within `lasting_output`, and when the process ends, nothing that is printed fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, Self, TextIO, cast


class _Lasting:
    """A stream that drops what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Drop what standard output and standard error cannot take."""
    streams = sys.stdout, sys.stderr
    out, errors = (cast("TextIO", _Lasting(stream)) for stream in streams)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            yield
    finally:
        for stream in streams:
            _drop_unwritten(stream)


def _drop_unwritten(stream: TextIO) -> None:
    """Flush the stream or, if that fails, let nothing be left over: Python's own flush at the end would set the exit code."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())


class Interrupts:
    """Remembers whether Ctrl-C was pressed while it is entered, and raises `KeyboardInterrupt` as Python does.

    Python prints and ignores the exception if one arrives in a finalizer or in a fork hook, and a starting run forks a lot.
    """

    def __enter__(self) -> Self:
        self._pressed = False
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if the exception of a Ctrl-C was ignored."""
        if self._pressed:
            raise KeyboardInterrupt

    def _press(self, *_: Any) -> NoReturn:
        self._pressed = True
        raise KeyboardInterrupt
