"""State by parameter, in files that any number of ranks, split in any way, can read.

A rank holds flat tensors, each of which contains pieces of parameters. Its file stores the flat tensors unchanged, together with
the positions of the pieces. A reader requests elements of a parameter and gets them from the files that have them.

Guarantees: values are restored bit for bit; a reader holds only what it requested, because files are mapped into memory; elements
that no file has are a `StateError`. What `write_state` has written is on the disk; a failure is a `StateError` that names the
file, the reason and the remedy; files hold only tensors and plain values, and reading one runs none of its code.
"""

from __future__ import annotations

import errno
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from services.runtime import atomic_folders


class StateError(RuntimeError):
    """State could not be written or read; the message names the file and the reason."""


@dataclass(frozen=True)
class Piece:
    """`count` elements of the flattened parameter `name`, starting at its element `first`, at `offset` of a flat tensor."""

    name: str
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class Flat:
    """Tensors [n] with the same layout, by kind, and the pieces in them; padding belongs to no piece."""

    pieces: list[Piece]
    tensors: dict[str, Tensor]
    step: int = 0
    """Optimizer steps they have seen, if applicable."""


def whole(name: str, parameter: Tensor) -> Piece:
    """Return the piece that covers a whole parameter."""
    return Piece(name, 0, parameter.numel(), 0)


def share(sizes: Mapping[str, int], rank: int, ranks: int) -> set[str]:
    """Return the names that this rank writes of what all ranks hold. Balances sizes; all ranks get the same assignment."""
    loads = [0] * ranks
    mine = set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[name]
        if lightest == rank:
            mine.add(name)
    return mine


def write(path: Path, flats: Iterable[Flat]) -> None:
    """Write what this rank holds. Raises `StateError`."""
    write_state(
        path,
        [
            {
                "pieces": [(piece.name, piece.first, piece.count, piece.offset) for piece in flat.pieces],
                "tensors": {kind: _alone(tensor.detach().view(-1)) for kind, tensor in flat.tensors.items()},
                "step": flat.step,
            }
            for flat in flats
        ],
    )


class Archive:
    """The files `<stem>-<rank>.pt` of a folder, from all ranks that wrote."""

    def __init__(self, folder: Path, stem: str) -> None:
        """Open the files. Raises `StateError` if there are none, or one is damaged."""
        self._place, self._pieces = folder / f"{stem}-*.pt", defaultdict[str, list[tuple[Piece, Flat]]](list)
        files = sorted(folder.glob(f"{stem}-*.pt"))
        if not files:
            raise StateError(f"{self._place}: no such files")
        for file in files:
            for record in read_state(file):
                flat = Flat([Piece(*piece) for piece in record["pieces"]], record["tensors"], record["step"])
                for piece in flat.pieces:
                    self._pieces[piece.name].append((piece, flat))

    def step(self, name: str) -> int:
        """Return the number of optimizer steps that a parameter has seen."""
        return max((flat.step for _, flat in self._pieces[name]), default=0)

    def copy(self, kind: str, wanted: Piece, into: Tensor) -> None:
        """Copy the elements of a piece to its place in `into` [n]. Raises `StateError` if any are missing."""
        target = into[wanted.offset : wanted.offset + wanted.count]
        copied = 0
        for held, flat in self._pieces[wanted.name]:
            begin = max(held.first, wanted.first)
            count = min(held.first + held.count, wanted.first + wanted.count) - begin
            if count > 0 and kind in flat.tensors:
                source = flat.tensors[kind].narrow(0, held.offset + begin - held.first, count)
                target.narrow(0, begin - wanted.first, count).copy_(source)
                copied += count
        if copied != wanted.count:
            raise StateError(
                f"{self._place}: {wanted.count - copied} of {wanted.count} elements of {wanted.name} ({kind}) are missing"
            )


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor without a larger storage behind it, which would be written too."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


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
