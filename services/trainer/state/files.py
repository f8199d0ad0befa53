"""Writes state to disk and reads it back.

Guarantees: what `write_state` has written is on the disk; a failure is a `StateError` that names the file, the reason and the
remedy; files hold only tensors and plain values, and reading one runs none of its code.
"""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch

from services.runtime import atomic_folders


class StateError(RuntimeError):
    """State could not be written or read; the message names the file and the reason."""


def write_state(path: Path, state: Any) -> None:
    """Write tensors and plain values, and force them to disk. Raises `StateError`.

    Tensors on a GPU pass through host memory one at a time.
    """
    writer: _Writer | None = None
    try:
        with path.open("wb") as file:
            writer = _Writer(file)
            torch.save(state, writer)  # pyright: ignore[reportArgumentType]
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch's archive writer turns an error of the disk into a RuntimeError
        refused = error if isinstance(error, OSError) else writer and writer.refused
        raise StateError(atomic_folders.explain(path, refused) if refused else f"{path} cannot be written: {error}") from error


def read_state(path: Path) -> Any:
    """Read what `write_state` wrote. Tensors are mapped from the file and read when used. Raises `StateError`."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        if error.errno == errno.EINVAL:  # its header says it is longer than it is
            raise StateError(f"{path} is damaged: it is truncated") from error
        raise StateError(f"{path} cannot be read: {error.strerror}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError) as error:  # raised by torch's reader on damaged bytes
        raise StateError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    except pickle.UnpicklingError as error:
        raise StateError(f"{path} is damaged: it contains more than tensors and plain values") from error


class _Writer:
    """A file that remembers why a write failed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.refused = file, None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.refused: OSError | None = error
            raise

    def flush(self) -> None:
        self._file.flush()
