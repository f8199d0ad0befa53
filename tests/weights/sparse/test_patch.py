"""The patch format: patches encoded by one or several ranks decode bitwise, and damaged or impossible ones are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.weights.checksums import WeightChanged, checksums
from services.weights.collective import WeightManifest
from services.weights.sparse import encoder as encoders
from services.weights.sparse import patch as patches
from services.weights.sparse.changes import bits
from services.weights.sparse.encoder import ChangeEncoder
from services.weights.sparse.patch import Patch, assemble, decode, decode_row
from services.weights.versions import encoder as versions
from services.weights.versions.broadcast import Heading
from services.weights.versions.encoder import whole_shards
from services.weights.versions.positions import InvalidVersion
from tests.support.models.fused_model import checkpoint, manifest_of
from tests.weights.sparse.test_placement import changed

PIECE = 96  # bytes, so that a tensor has several pieces


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(patches, "CHUNK_BYTES", 512)


def encoded_by(
    ranks: int, share: float = 0.05
) -> tuple[WeightManifest, dict[str, Any], dict[str, Any], Patch, list[torch.Tensor]]:
    """Return old and new weights, and the patch that `ranks` ranks encode."""
    old = checkpoint()
    manifest = manifest_of(old)
    new = changed(old, 3, share)
    parameters = {name: torch.nn.Parameter(weight.clone(), requires_grad=False) for name, weight in old.items()}
    for parameter in parameters.values():
        parameter.requires_grad = parameter.is_floating_point()
    shares = [ChangeEncoder(whole_shards(parameters, rank, ranks), rank) for rank in range(ranks)]
    for each in shares:
        each.load()
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            parameter.data.copy_(new[name])
        else:
            new[name] = old[name]  # frozen
    made = [each.encode() for each in shares]
    patch = assemble(6, [row for rows, _ in made for row in rows], manifest)
    assert all(not each.encode()[0] for each in shares), "the base has the current bits"
    return manifest, old, new, patch, [block for _, data in made for block in data]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("share", [0.001, 0.05, 1.0])
def test_changes_are_decoded_in_chunks_of_one_rank_each(ranks: int, share: float) -> None:
    manifest, old, new, patch, data = encoded_by(ranks, share)
    heading = patch.heading(2, 7)
    table = patch.encoded(2, 7)
    assert heading.manifest_nbytes == table.numel()
    assert decode(table, heading, manifest) == patch
    held = {name: bits(weight.clone()) for name, weight in old.items()}
    payload, end, seen = torch.cat(data), 0, list[int]()
    for rows, nbytes in patch.chunks():
        chunk, end = payload[end : end + nbytes], end + nbytes
        assert len({patch.rows[i].part for i in rows}) == 1
        assert nbytes <= patches.CHUNK_BYTES or len(rows) == 1
        for i, block in zip(rows, chunk.split([patch.sizes[i] for i in rows]), strict=True):
            row = patch.rows[i]
            assert tuple(checksums([block])[0].tolist()) == row.checksum
            name = manifest.tensors[row.tensor].name
            where, was, is_now = decode_row(row, block, old[name].element_size())
            assert torch.equal(held[name][where], was.view(held[name].dtype))
            held[name][where] = is_now.view(held[name].dtype)
            seen.append(i)
    assert (end, seen) == (payload.numel(), list(range(len(patch.rows))))
    assert all(torch.equal(held[name], bits(new[name])) for name in new)
    assert patch.changed == sum(int((bits(new[name]) != bits(old[name])).sum()) for name in new)


def test_no_changes_give_a_table_without_rows() -> None:
    manifest, _, _, patch, data = encoded_by(2, 0.0)
    assert (patch.rows, data, list(patch.chunks())) == ([], [], [])
    assert decode(patch.encoded(2, 7), patch.heading(2, 7), manifest) == patch


def test_every_flipped_byte_of_a_table_is_detected() -> None:
    manifest, _, _, patch, _ = encoded_by(1, 0.002)
    table, heading = patch.encoded(2, 7), patch.heading(2, 7)
    for place in range(table.numel()):
        damaged = table.clone()
        damaged[place] ^= 1 << place % 8
        with pytest.raises((InvalidVersion, WeightChanged)):
            decode(damaged, heading, manifest)
    for length in (0, 63, 64, table.numel() - 64):
        with pytest.raises((InvalidVersion, WeightChanged)):
            decode(table[:length].clone(), heading, manifest)


IMPOSSIBLE: list[dict[str, int]] = [
    {"tensor": -1}, {"tensor": 99}, {"start": -1}, {"start": 10**9}, {"count": 10**9}, {"changed": 0}, {"changed": 10**6},
    {"gaps_nbytes": 0}, {"gaps_nbytes": 10**9}, {"part": -1},
]  # fmt: skip


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_an_impossible_row_is_rejected_despite_its_checksum(change: dict[str, int]) -> None:
    manifest, _, _, patch, _ = encoded_by(1)
    rows = [patch.rows[0]._replace(**change), *patch.rows[1:]]
    with pytest.raises(InvalidVersion, match="impossible"):
        decode(Patch(6, rows, patch.sizes).encoded(2, 7), patch.heading(2, 7), manifest)


def test_overlapping_rows_and_mismatched_headings_are_rejected() -> None:
    manifest, _, _, patch, _ = encoded_by(1)
    twice = Patch(6, [*patch.rows, patch.rows[0]], [*patch.sizes, patch.sizes[0]])
    with pytest.raises(InvalidVersion, match="overlap"):
        decode(twice.encoded(2, 7), twice.heading(2, 7), manifest)
    table, right = patch.encoded(2, 7), patch.heading(2, 7)
    for heading in (
        Heading(3, 7, right.manifest_nbytes, right.data_nbytes),
        Heading(2, 8, right.manifest_nbytes, right.data_nbytes),
        Heading(2, 7, right.manifest_nbytes, right.data_nbytes + 8),
    ):
        with pytest.raises(InvalidVersion, match=r"describes|announces"):
            decode(table, heading, manifest)


def test_frozen_weights_need_no_copy() -> None:
    weights = {
        name: torch.nn.Parameter(weight, requires_grad=name == "q") for name, weight in checkpoint().items() if name != "counts"
    }
    share = encoders.ChangeEncoder(whole_shards(weights, 0, 1), 0)
    share.load()
    assert sum(base.nbytes for base in share._base) == weights["q"].nbytes
