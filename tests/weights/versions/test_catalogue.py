"""Catalogues: the way to a version, when an anchor is due, and what is kept or may be deleted."""

from __future__ import annotations

import pytest

from services.weights.versions.catalogue import ANCHOR_EVERY, Catalogue, Entry, InvalidVersion, announce, decode, encode, garbage

FENCE = 5


def _anchor(version: int, nbytes: int = 100) -> Entry:
    return Entry(version, None, nbytes, 100, 1.0, ["a.0"])


def _delta(version: int, nbytes: int = 2) -> Entry:
    return Entry(version, version - 1, nbytes, 100, 0.02, ["a.0", "b.0"])


@pytest.mark.parametrize(
    ("entries", "due"),
    [
        ([], True),
        ([_delta(4)], True),
        ([_anchor(3)], False),
        ([_anchor(3), *(_delta(version) for version in range(4, 3 + ANCHOR_EVERY - 1))], False),
        ([_anchor(3), *(_delta(version) for version in range(4, 3 + ANCHOR_EVERY))], True),
        ([_anchor(3), _delta(4, 50), _delta(5, 49)], False),
        ([_anchor(3), _delta(4, 50), _delta(5, 50)], True),
        ([_anchor(3), _delta(4, 99), _anchor(4), _delta(5, 99)], False),  # only those since the last anchor count
    ],
)
def test_an_anchor_is_due_after_many_versions_or_large_deltas(entries: list[Entry], due: bool) -> None:
    assert Catalogue(FENCE, entries).anchor_due() is due


@pytest.mark.parametrize(
    ("held", "version", "way"),
    [
        (6, 6, []),
        (None, 3, ["3.anchor"]),
        (None, 4, ["3.anchor", "4.delta"]),
        (None, 6, ["5.anchor", "6.delta"]),  # the later of two anchors
        (2, 6, ["5.anchor", "6.delta"]),  # nothing continues from 2
        (4, 6, ["5.delta", "6.delta"]),
        (3, 5, ["4.delta", "5.delta"]),  # 60 + 40 bytes, as many as the anchor has
        (3, 8, ["8.anchor"]),  # 40 + 50 + 61 bytes would be more
        (5, 8, ["6.delta", "7.delta", "8.delta"]),
    ],
)
def test_the_way_to_a_version_has_the_fewest_bytes(held: int | None, version: int, way: list[str]) -> None:
    deltas = [_delta(4, 60), _delta(5, 40), _delta(6, 1), _delta(7, 1), _delta(8, 1)]
    catalogue = Catalogue(FENCE, [_anchor(3), *deltas[:2], _anchor(5), *deltas[2:], _anchor(8)])
    assert [entry.folder for entry in catalogue.chain(held, version)] == way


def test_a_version_without_a_way_is_an_error() -> None:
    for version in (3, 9):
        with pytest.raises(InvalidVersion, match=f"no way to version {version} of trainer 5, newest is 4"):
            Catalogue(FENCE, [_delta(3), _delta(4)]).chain(None, version)


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ([], []),
        ([_delta(1)], ["1.delta"]),
        ([_delta(3), _anchor(3), _delta(4)], ["3.anchor", "4.delta"]),
        ([_anchor(3), _delta(4), _anchor(4), _delta(5), _anchor(5)], ["4.anchor", "5.delta", "5.anchor"]),
    ],
)
def test_a_trimmed_catalogue_begins_with_the_last_anchor_but_one(entries: list[Entry], kept: list[str]) -> None:
    assert [entry.folder for entry in Catalogue(FENCE, entries).trimmed().entries] == kept


def test_an_entry_that_is_written_again_replaces_the_former() -> None:
    catalogue = Catalogue(FENCE).with_entry(_anchor(3)).with_entry(_delta(3)).with_entry(_anchor(3, 7))
    assert catalogue.entries == [_delta(3), _anchor(3, 7)]


def test_an_entry_exists_if_its_manifest_and_all_parts_do() -> None:
    catalogue = Catalogue(FENCE, [_anchor(3), _delta(4)])
    names = [f"5/3.anchor/{name}" for name in ("manifest", "a.0")] + [f"5/4.delta/{name}" for name in ("manifest", "a.0", "b.0")]
    assert catalogue.existing(names) == catalogue
    for lost in names:
        left = catalogue.existing([name for name in names if name != lost]).entries
        assert [entry.folder in lost for entry in left] == [False]


@pytest.mark.parametrize(
    ("name", "readers", "gone"),
    [
        ("5/3.anchor/a.0", [], False),  # in the catalogue
        ("5/4.delta/manifest", [], False),  # being written
        ("5/3.delta/a.0", [], True),
        ("5/3.delta/a.0", ["5/3"], False),
        ("5/3.delta/a.0", ["5/4", "5/2", "5/9"], False),  # of several readers, the earliest decides
        ("5/3.delta/a.0", ["5/4", "4/0", "rubbish", "5/x", "x/3"], True),
        ("4/9.anchor/a.0", [], True),  # of an earlier trainer
        ("4/9.anchor/a.0", ["4/9"], False),
        ("4/9.anchor/a.0", ["4/10"], True),
        ("6/3.delta/a.0", [], False),  # of a later trainer
        ("4/catalogue.json", [], True),
        ("4/catalogue.json", ["4/9"], False),
        ("5/catalogue.json", [], False),
        ("6/catalogue.json", [], False),
        ("x/catalogue.json", [], False),  # not ours
        ("4/notes.txt", [], False),
        ("4/x.delta/a.0", [], False),
        ("x/3.delta/a.0", [], False),
        ("4", [], False),
    ],
)
def test_objects_that_nobody_needs_may_be_deleted(name: str, readers: list[str], gone: bool) -> None:
    assert garbage([name], Catalogue(FENCE, [_anchor(3)]), ["4.delta"], readers) == ([name] if gone else [])


def test_a_reader_announces_a_trainer_and_a_version() -> None:
    assert not garbage(["4/9.anchor/a.0"], Catalogue(FENCE), [], [announce(4, 9)])


def test_a_catalogue_is_read_back_and_checked() -> None:
    catalogue = Catalogue(FENCE, [_anchor(3), _delta(4)])
    assert decode(encode(catalogue), FENCE) == catalogue
    for wrong, said in (
        (b"{", "this is no catalogue: "),
        (encode(Catalogue(4)), "not the catalogue of trainer 5"),
        (encode(Catalogue(FENCE, [Entry(3, None, 1, 1, 1.0, ["../a"])])), "not the catalogue of trainer 5"),
    ):
        with pytest.raises(InvalidVersion, match=said):
            decode(wrong, FENCE)
