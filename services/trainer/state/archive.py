"""State by parameter, in files that any number of ranks, split in any way, can read.

A rank holds flat tensors, each of which contains pieces of parameters. Its file stores the flat tensors unchanged, together with
the positions of the pieces. A reader requests elements of a parameter and gets them from the files that have them.

Guarantees: values are restored bit for bit; a reader holds only what it requested, because files are mapped into memory; elements
that no file has are a `StateError`.
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
