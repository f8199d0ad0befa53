"""An empty receiver fetches an anchor with its deltas, whatever the memory limit, the pieces and the damage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from services.weights.checksums import WeightChanged
from services.weights.deadline import Deadline
from services.weights.versions import catalogue, encoder, manifest, reader
from services.weights.versions.catalogue import CATALOGUE, MANIFEST, Catalogue, Entry, InvalidVersion
from services.weights.versions.mirror import NOTHING, WeightMirror
from services.weights.versions.objects import FolderObjects
from services.weights.versions.reader import VersionReader
from tests.support.versions import FENCE, Publisher, assert_same_bits, change, copies, parameters

DELTAS = 5


class Stored:
    """A folder with versions of a trainer, and the weights of each."""

    def __init__(self, folder: Path) -> None:
        self.place, self._objects = str(folder / str(FENCE)), FolderObjects(folder / str(FENCE))
        self.catalogue, self.weights = Catalogue(FENCE), list[dict[str, torch.Tensor]]()

    def put(self, publisher: Publisher, delta: bool) -> Entry:
        made, parts = publisher.delta() if delta else publisher.anchor()
        names = [part.name for part in made.parts]
        entry = Entry(made.version, made.base, made.nbytes, made.full_nbytes, 0.1, names)
        for index, data in parts.items():
            self._objects.put(f"{entry.folder}/{names[index]}", [data])
        self._objects.put(f"{entry.folder}/{MANIFEST}", [manifest.encode(made)])
        self.catalogue = self.catalogue.with_entry(entry)
        self._objects.put(CATALOGUE, [catalogue.encode(self.catalogue)])
        self.weights.append(copies(publisher.parameters))
        return entry

    def take(self, mirror: WeightMirror, version: int) -> dict[str, torch.Tensor]:
        return dict(VersionReader(self.place, mirror).take(Deadline(20), version))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """Yield an anchor in several parts of several pieces, and deltas."""
    monkeypatch.setattr(encoder, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(encoder, "PART_BYTES", 50_000)
    made, publisher = Stored(tmp_path), Publisher(parameters(), ranks=2)
    made.put(publisher, delta=False)
    for version in range(1, DELTAS + 1):
        change(publisher.parameters, version, share=(0.001, 0.02, 0.0, 1.0, 0.4)[version - 1])
        made.put(publisher, delta=True)
    return made


@pytest.mark.parametrize("room", [256 << 20, 100_000, 0])
def test_every_version_is_restored_bitwise(stored: Stored, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for all deltas beside the anchor, for some, or only for the one that is always fetched ahead."""
    monkeypatch.setattr(reader, "FETCHED_AHEAD_BYTES", room)
    for version in range(DELTAS + 1):
        mirror = WeightMirror()
        assert_same_bits(stored.take(mirror, version), stored.weights[version])
        assert mirror.held == (FENCE, version)
        assert_same_bits(stored.take(mirror, DELTAS), stored.weights[DELTAS])


def test_a_delta_in_other_pieces_is_applied_after_the_anchor(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(parameters(), ranks=2)
    publisher.version = DELTAS
    stored.put(publisher, delta=False)
    monkeypatch.setattr(encoder, "PIECE_BYTES", 5_000)
    other = Publisher(publisher.parameters)
    other.anchor()
    other.version = publisher.version
    change(publisher.parameters, 9)
    entry = stored.put(other, delta=True)
    mirror = WeightMirror()
    assert_same_bits(stored.take(mirror, entry.version), stored.weights[-1])


@pytest.mark.parametrize("version", [0, 1, DELTAS])
def test_a_damaged_part_leaves_nothing_until_it_is_repaired(stored: Stored, version: int) -> None:
    entry = stored.catalogue.entries[version]
    path = Path(stored.place) / entry.folder / entry.parts[0]
    whole = path.read_bytes()
    for damaged in (bytes([*whole[:300], whole[300] ^ 1, *whole[301:]]), whole[:-1]):
        path.write_bytes(damaged)
        mirror = WeightMirror()
        with pytest.raises((WeightChanged, InvalidVersion, RuntimeError)):
            stored.take(mirror, DELTAS)
        assert mirror.held == NOTHING
        path.write_bytes(whole)
        assert_same_bits(stored.take(mirror, DELTAS), stored.weights[DELTAS])


def test_an_abandoned_fetch_does_not_overwrite_the_next_one(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread keeps reading although nobody waits for it, into memory where another reader puts a later version."""
    mirror, begun, go_on = WeightMirror(), threading.Event(), threading.Event()
    first, second = (VersionReader(stored.place, mirror) for _ in range(2))
    read_into = FolderObjects.read_into

    def slow(objects: FolderObjects, *given: Any) -> Iterator[None]:
        if objects is first._objects:
            begun.set()
            assert go_on.wait(20)
        yield from read_into(objects, *given)

    monkeypatch.setattr(FolderObjects, "read_into", slow)
    with ThreadPoolExecutor(2) as threads:
        abandoned = threads.submit(first.take, Deadline(20), 0)
        assert begun.wait(20)
        wanted = threads.submit(second.take, Deadline(20), DELTAS)
        wait([wanted], 0.3)  # it must not finish before the other one has ended
        go_on.set()
        abandoned.result()
        assert_same_bits(dict(wanted.result()), stored.weights[DELTAS])
    assert mirror.held == (FENCE, DELTAS)
