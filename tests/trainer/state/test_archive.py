"""Any ranks read what any other ranks wrote: bitwise and completely, or with an error that names what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.state import archive
from services.trainer.state.archive import Archive, Flat, Piece, StateError, read_state, write_state

SIZES = {"a": 7, "b": 1, "c": 12}


def _values(name: str) -> torch.Tensor:
    return torch.arange(SIZES[name]) + 100.0 * ord(name)


def _split(size: int, ranks: int) -> list[list[Piece]]:
    """Concatenate all parameters into a flat tensor and cut it into a part of `size` per rank."""
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    start = 0
    for name, count in SIZES.items():
        for rank in range(ranks):
            begin, end = max(start, rank * size), min(start + count, (rank + 1) * size)
            if begin < end:
                pieces[rank].append(Piece(name, begin - start, end - begin, begin - rank * size))
        start += count
    return pieces


def _flat(pieces: Sequence[Piece], size: int) -> torch.Tensor:
    flat = torch.full((size,), -1.0)
    for piece in pieces:
        flat[piece.offset : piece.offset + piece.count] = _values(piece.name)[piece.first : piece.first + piece.count]
    return flat


@given(writers=st.integers(1, 5), readers=st.integers(1, 5))
def test_any_ranks_read_what_any_other_ranks_wrote(writers: int, readers: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, total = tmp_path_factory.mktemp("archive"), sum(SIZES.values())
    size = -(-total // writers)
    for rank, pieces in enumerate(_split(size, writers)):
        archive.write(folder / f"state-{rank}.pt", [Flat(pieces, {"weights": _flat(pieces, size)}, step=rank)])
    saved = Archive(folder, "state")
    size = -(-total // readers)
    for pieces in _split(size, readers):
        into = torch.full((size,), -1.0)
        for piece in pieces:
            saved.copy("weights", piece, into)
        assert torch.equal(into, _flat(pieces, size))
    assert saved.step("c") == max(rank for rank, pieces in enumerate(_split(-(-total // writers), writers)) if pieces)


def test_missing_elements_are_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"state-\*\.pt: no such files"):
        Archive(tmp_path, "state")
    archive.write(tmp_path / "state-0.pt", [Flat([Piece("a", 0, 3, 2)], {"weights": torch.arange(8.0)})])
    saved = Archive(tmp_path, "state")
    with pytest.raises(StateError, match=r"4 of 7 elements of a \(weights\) are missing"):
        saved.copy("weights", Piece("a", 0, 7, 0), torch.zeros(7))
    with pytest.raises(StateError, match=r"3 of 3 elements of a \(exp_avg\) are missing"):
        saved.copy("exp_avg", Piece("a", 0, 3, 0), torch.zeros(3))
    with pytest.raises(StateError, match="1 of 1 elements of b"):
        saved.copy("weights", Piece("b", 0, 1, 0), torch.zeros(1))
    assert saved.step("b") == 0


def test_only_viewed_elements_are_written(tmp_path: Path) -> None:
    large = torch.arange(100_000.0)
    archive.write(tmp_path / "state-0.pt", [Flat([Piece("a", 0, 10, 0)], {"weights": large[:10]})])
    assert (tmp_path / "state-0.pt").stat().st_size < 10_000


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shares_are_complete_disjoint_and_balanced(ranks: int) -> None:
    sizes = {f"p{i}": 1 + i % 5 for i in range(40)}
    shares = [archive.share(sizes, rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"\x80\x02]q\x00.", None])
def test_a_damaged_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "state-0.pt"
    if content is None:
        write_state(path, {"a": torch.arange(1000.0)})
        content = path.read_bytes()[:-600]
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"state-0\.pt is damaged: "):
        read_state(path)


def test_a_file_that_would_run_code_is_rejected(tmp_path: Path) -> None:
    torch.save({"a": Path("/")}, tmp_path / "state-0.pt")
    with pytest.raises(StateError, match="is damaged: it contains more than tensors and plain values"):
        read_state(tmp_path / "state-0.pt")
