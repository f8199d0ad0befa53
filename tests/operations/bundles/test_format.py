"""A bundle's file is either read completely or rejected, whatever its bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.operations.bundles import format as bundles
from services.operations.bundles.format import Bundle, BundleError, Origin, RecordedGroup, RecordedStep
from services.runtime.atomic_folders import FileRecord

BUNDLE = Bundle(
    run="seen", step=3, recorded_s=1.5, dataset="d", config="[run]", versions={"python": "3"}, origin=Origin(),
    steps=[RecordedStep(b"plan", [b"rank"], {"loss/train/sum": 0.1, "lost": None})],
    groups={"0-1.2": RecordedGroup(b"header", b"payload", "4", "")}, weights={}, model={},
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "one").write_bytes(b"1" * 3000)
    (folder / "two").write_bytes(b"2")
    files = {"model/config.json": folder / "one", "state/state-0.safetensors": folder / "two"}
    assert bundles.write(folder / "bundle", BUNDLE, files) == (folder / "bundle").stat().st_size
    assert sorted(path.name for path in folder.iterdir()) == ["bundle", "one", "two"]
    return (folder / "bundle").read_bytes()


def read_whole(folder: Path) -> None:
    """Read the bundle in a folder and all its files."""
    file = bundles.read(folder / "bundle")
    file.unpack("model", folder)
    file.unpack("state", folder)


def test_a_bundle_round_trips(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(whole)
    file = bundles.read(tmp_path / "bundle")
    assert msgspec.structs.replace(file.bundle, files={}) == BUNDLE
    assert (file.has("model"), file.has("tensors")) == (True, False)
    assert (file.unpack("model", tmp_path) / "config.json").read_bytes() == b"1" * 3000
    assert (file.unpack("state", tmp_path) / "state-0.safetensors").read_bytes() == b"2"


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_is_detected(whole: bytes, tmp_path_factory: pytest.TempPathFactory, place: int, bit: int, cut: bool) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    at = place % len(whole)
    changed = whole[:at] if cut else whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    (folder / "bundle").write_bytes(changed)
    with pytest.raises(BundleError):
        read_whole(folder)


@given(body=st.binary(max_size=200))
def test_arbitrary_bytes_with_a_valid_checksum_are_rejected(body: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "bundle"
    path.write_bytes(bundles.MAGIC + hashlib.sha256(body).digest() + len(body).to_bytes(8, "little") + body)
    with pytest.raises(BundleError, match="not a valid bundle"):
        bundles.read(path)


@pytest.mark.parametrize(
    ("place", "reason"), [("file/bundle", "Not a directory"), ("n" * 300, "File name too long"), ("none/bundle", "No such file")]
)
def test_a_place_that_cannot_be_written_is_explained(place: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BundleError, match=f"cannot be written: {reason}.*; free space there, or choose another place with --out"):
        bundles.write(tmp_path / place, BUNDLE, {})


@pytest.mark.parametrize(
    "name", ["model/../../x.json", "/etc/x.json", "model/a/b.json", "model/run.py", "model/x.bin", "state/.x.json"]
)
def test_an_unsafe_file_name_is_rejected(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(BundleError, match="cannot be a file of a bundle"):
        bundles.write(tmp_path / "bundle", BUNDLE, {name: tmp_path / "file"})
    record = FileRecord(1, hashlib.sha256(b"x").hexdigest())
    body = msgspec.msgpack.encode(msgspec.structs.replace(BUNDLE, files={name: record}))
    (tmp_path / "bundle").write_bytes(
        bundles.MAGIC + hashlib.sha256(body).digest() + len(body).to_bytes(8, "little") + body + b"x"
    )
    with pytest.raises(BundleError, match="which no bundle may have"):
        bundles.read(tmp_path / "bundle")
