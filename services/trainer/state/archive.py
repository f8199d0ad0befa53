"""State by parameter: files that any number of ranks, split in any way, can read.

A rank holds flat tensors, and in each of them pieces of parameters. Its file stores the flat tensors as they are, and where
the pieces lie. A reader asks for elements of a parameter and gets them from whichever files have them.

Guarantees: values come back to the bit; a reader holds no more than what it asked for, as files are mapped into memory; what
no file has is a `StateError`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from services.trainer.state.files import StateError, read_state, write_state


@dataclass(frozen=True)
class Piece:
    """`count` elements of the flattened parameter `name`, from its element `first` on, at `offset` of a flat tensor."""

    name: str
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class Flat:
    """Tensors [n] that are laid out alike, by kind, and what lies in them; padding lies in no piece."""

    pieces: list[Piece]
    tensors: dict[str, Tensor]
    step: int = 0
    """Optimizer steps they have seen, where that means something."""


def whole(name: str, parameter: Tensor) -> Piece:
    """The piece that is all of a parameter."""
    return Piece(name, 0, parameter.numel(), 0)


def share(sizes: Mapping[str, int], rank: int, ranks: int) -> set[str]:
    """Which names this rank writes of what all ranks hold; sizes are levelled, and all ranks agree."""
    loads = [0] * ranks
    mine = set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name]
        if least == rank:
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
    """The files `<stem>-<rank>.pt` of a folder, of all ranks that wrote."""

    def __init__(self, folder: Path, stem: str) -> None:
        """Raises `StateError` when there are none, or one is damaged."""
        self._place, self._pieces = folder / f"{stem}-*.pt", defaultdict[str, list[tuple[Piece, Flat]]](list)
        files = sorted(folder.glob(f"{stem}-*.pt"))
        if not files:
            raise StateError(f"{self._place}: there are no such files")
        for file in files:
            for record in read_state(file):
                flat = Flat([Piece(*piece) for piece in record["pieces"]], record["tensors"], record["step"])
                for piece in flat.pieces:
                    self._pieces[piece.name].append((piece, flat))

    def step(self, name: str) -> int:
        """Optimizer steps that a parameter has seen."""
        return max((flat.step for _, flat in self._pieces[name]), default=0)

    def copy(self, kind: str, wanted: Piece, into: Tensor) -> None:
        """Put the elements of a piece where it says in `into` [n]. Raises `StateError` when any is not there."""
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
    """The tensor without a larger storage behind it, which would be written too."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()
