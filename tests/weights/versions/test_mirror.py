"""A receiver's copy of the weights: versions are applied atomically, whatever arrives."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.weights.checksums import WeightChanged
from services.weights.deadline import Deadline
from services.weights.versions import encoder
from services.weights.versions import mirror as mirror_module
from services.weights.versions.catalogue import InvalidVersion
from services.weights.versions.manifest import TensorPiece, VersionManifest, decode, encode
from services.weights.versions.mirror import NOTHING, WeightMirror
from services.weights.versions.objects import Target
from tests.support.versions import FENCE, Publisher, assert_same_bits, bring, change, copies, parameters

Data = dict[int, memoryview]


@pytest.fixture(autouse=True, scope="module")
def many_threads() -> Iterator[None]:
    """Make a different thread apply every piece."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mirror_module, "THREADS", 4)
        patched.setattr(mirror_module, "GROUP", 1)
        yield


def wired(manifest: VersionManifest) -> VersionManifest:
    return decode(encode(manifest))


@pytest.mark.parametrize("ranks", [1, 3])
def test_versions_are_applied_bitwise(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(encoder, "PART_BYTES", 50_000)
    trained = parameters()
    publisher, mirror = Publisher(trained, ranks), WeightMirror()
    manifest, parts = publisher.anchor()
    assert len(manifest.parts) > 1
    bring(mirror, wired(manifest), reversed(parts.items()))
    assert_same_bits(dict(mirror.weights()), copies(trained))
    for version in range(1, 6):
        change(trained, version, share=(0.0, 0.001, 0.02, 0.4, 1.0)[version - 1])
        manifest, parts = publisher.delta()
        bring(mirror, wired(manifest), parts.items())
        assert mirror.held == (FENCE, version)
        assert_same_bits(dict(mirror.weights()), copies(trained))


@pytest.mark.parametrize("count", [255, 256, 510, 511, 1021])
def test_a_change_of_the_last_element_alone_is_applied(count: int) -> None:
    """Its gap takes as many bytes as a manifest allows."""
    weight = torch.nn.Parameter(torch.zeros(count))
    publisher, mirror = Publisher({"one": weight}), WeightMirror()
    bring(mirror, *_items(publisher.anchor()))
    weight.data[-1] = 1.0
    manifest, parts = publisher.delta()
    assert manifest.pieces[0].encoding == "gaps"
    bring(mirror, wired(manifest), parts.items())
    assert_same_bits(dict(mirror.weights()), copies({"one": weight}))


def test_an_anchor_of_the_base_is_the_last_version() -> None:
    trained = parameters()
    publisher, mirror = Publisher(trained), WeightMirror()
    publisher.anchor()
    change(trained, 1)
    publisher.delta()
    expected = copies(trained)
    change(trained, 2)  # training continues while the anchor is written
    [part] = publisher.encoders[0].whole()
    manifest, parts = publisher._assembled([part], None)
    bring(mirror, wired(manifest), parts.items())
    assert_same_bits(dict(mirror.weights()), expected)


@pytest.fixture(scope="module")
def pair() -> tuple[tuple[VersionManifest, Data], tuple[VersionManifest, Data], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    trained = parameters()
    publisher = Publisher(trained)
    anchor, before = publisher.anchor(), copies(trained)
    change(trained, 1)
    return anchor, publisher.delta(), before, copies(trained)


def test_a_delta_is_rejected_without_its_base(pair) -> None:
    anchor, delta, _, _ = pair
    mirror = WeightMirror()
    with pytest.raises(InvalidVersion, match="version 1 changes version 0, which is not held"):
        bring(mirror, *_items(delta))
    bring(mirror, *_items(anchor))
    other = msgspec.structs.replace(delta[0], fence=FENCE + 1)
    with pytest.raises(InvalidVersion, match="not held"):
        bring(mirror, other, delta[1].items())
    bring(mirror, *_items(delta))
    with pytest.raises(InvalidVersion, match="not held"):
        bring(mirror, *_items(delta))


def test_a_wrong_checksum_undoes_the_whole_delta(pair) -> None:
    anchor, (manifest, parts), before, after = pair
    mirror = WeightMirror()
    bring(mirror, *_items(anchor))
    last = [piece for piece in manifest.pieces if piece.blocks][-1]
    pieces = [msgspec.structs.replace(piece, checksum=(1, 2)) if piece is last else piece for piece in manifest.pieces]
    with pytest.raises(WeightChanged, match=manifest.tensors[last.tensor].name):
        bring(mirror, msgspec.structs.replace(manifest, pieces=pieces), parts.items())
    assert mirror.held == (FENCE, 0)
    assert_same_bits(dict(mirror.weights()), before)
    bring(mirror, manifest, parts.items())
    assert_same_bits(dict(mirror.weights()), after)


def test_a_chain_is_verified_at_its_end(pair) -> None:
    (manifest, parts), delta, _, after = pair
    damaged = {0: memoryview(bytearray(parts[0]))}
    damaged[0][1000] ^= 1  # a byte of the first weight
    mirror = WeightMirror()
    with pytest.raises(WeightChanged):
        bring(mirror, manifest, damaged.items())
    bring(mirror, manifest, damaged.items(), last=False)
    with pytest.raises(WeightChanged, match=manifest.tensors[0].name):
        bring(mirror, *_items(delta))
    bring(mirror, manifest, parts.items(), last=False)
    bring(mirror, *_items(delta))
    assert_same_bits(dict(mirror.weights()), after)


def test_a_weight_changed_in_memory_is_detected_by_the_next_delta(pair) -> None:
    anchor, delta, _, _ = pair
    mirror = WeightMirror()
    bring(mirror, *_items(anchor))
    dict(mirror.weights())["frozen"][3, 3] = 5.0
    with pytest.raises(WeightChanged, match="frozen"):
        bring(mirror, *_items(delta))


def test_missing_parts_change_nothing(pair) -> None:
    anchor, (manifest, parts), before, _ = pair
    mirror = WeightMirror()
    bring(mirror, *_items(anchor))

    def breaking():
        yield from parts.items()
        raise OSError("the link is down")

    for wrong in (breaking(), [], [*parts.items(), *parts.items()], [(0, parts[0][:-1])], [(99, parts[0])]):
        with pytest.raises((OSError, InvalidVersion)):
            bring(mirror, manifest, wrong)
        assert_same_bits(dict(mirror.weights()), before)
    with pytest.raises(OSError, match="part 0 is lacking"):
        bring(mirror, anchor[0], [])
    assert mirror.held == NOTHING, "a broken anchor leaves nothing instead of a mixture"


def test_a_late_read_does_not_overwrite_current_memory(pair) -> None:
    (manifest, parts), delta, before, _ = pair
    mirror, given, filled = WeightMirror(), threading.Event(), threading.Event()

    def late(part: int, targets: Sequence[Target]) -> Iterator[None]:
        given.wait(20)
        for _, memory in targets:
            memory[:] = b"\x55" * len(memory)
        filled.set()
        yield

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(TimeoutError):
            mirror.load(manifest, late, pool, Deadline(0.05))
        bring(mirror, manifest, parts.items())
        given.set()
        assert filled.wait(20)
    assert_same_bits(dict(mirror.weights()), before)
    with pytest.raises(InvalidVersion, match="version 1 is a delta"), ThreadPoolExecutor(1) as pool:
        mirror.load(delta[0], late, pool, Deadline(1))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_give_an_error_or_the_right_bits(pair, data: st.DataObject) -> None:
    anchor, (manifest, parts), before, after = pair
    mirror = WeightMirror()
    bring(mirror, *_items(anchor))
    encoded, part = bytearray(encode(manifest)), bytearray(parts[0])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged = data.draw(st.sampled_from([encoded, part]))
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        bring(mirror, decode(bytes(encoded)), [(0, memoryview(part))])
    except (InvalidVersion, WeightChanged):
        assert mirror.held in ((FENCE, 0), NOTHING)
        if mirror.held != NOTHING:
            assert_same_bits(dict(mirror.weights()), before)
    else:
        assert_same_bits(dict(mirror.weights()), after)


def test_a_manifest_with_another_name_or_scale_is_rejected(pair) -> None:
    """No piece's checksum covers them."""
    encoded = encode(pair[1][0])
    assert encoded.count(b"odd") == 2
    with pytest.raises(InvalidVersion, match="some of its bytes have changed"):
        decode(b"oda".join(encoded.rsplit(b"odd", 1)))


def test_pieces_are_grouped_into_enough_work_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "GROUP", 10)
    pieces = [TensorPiece(0, 0, count, 0, "same", 0, 0, [], (0, 0)) for count in (5, 5, 9, 1, 4)]
    assert list(mirror_module.groups(pieces, range(5))) == [[0, 1], [2, 3], [4]]
    assert list(mirror_module.groups(pieces, [3, 4, 2, 0])) == [[3, 4, 2], [0]]
    assert list(mirror_module.groups(pieces, [])) == []


def test_versions_are_alike_with_the_same_tensors_in_the_same_pieces(pair) -> None:
    anchor, delta = pair[0][0], pair[1][0]
    other_tensors = msgspec.structs.replace(delta, tensors=delta.tensors[::-1])
    other_pieces = msgspec.structs.replace(delta, pieces=delta.pieces[::-1])
    assert mirror_module.alike([anchor])
    assert mirror_module.alike([anchor, delta])
    assert not mirror_module.alike([anchor, delta, other_tensors])
    assert not mirror_module.alike([anchor, other_pieces, delta])


def test_a_manifest_of_another_format_is_rejected(pair) -> None:
    with pytest.raises(InvalidVersion, match="format 2, here 3 is known"):
        decode(encode(msgspec.structs.replace(pair[1][0], format=2)))
    for rubbish in (b"", b"\x00", b"\x81", b"{}", bytes(100)):
        with pytest.raises(InvalidVersion, match="this is no manifest"):
            decode(rubbish)


def _items(version: tuple[VersionManifest, Data]):
    return version[0], version[1].items()
