"""The secrets of a run, of whose first start anything may be left."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.console.run.redis_server import start_server
from services.console.run.secrets import kept_secret, write_secret


def test_a_secret_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "redis" / "password"
    secret = kept_secret(path)
    assert (kept_secret(path), path.stat().st_mode & 0o777) == (secret, 0o600)
    assert [entry.name for entry in path.parent.iterdir()] == ["password"]


def test_an_empty_file_is_no_secret(tmp_path: Path) -> None:
    """It is what a first start left that an earlier version was interrupted in."""
    for name in ("password", "users/trainer"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    server = start_server(tmp_path, "small")
    server.stop()
    assert len((tmp_path / "password").read_text()) > 30
    assert len((tmp_path / "users" / "trainer").read_text()) > 30


def test_a_full_disk_leaves_the_secret_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "password"
    write_secret(path, "first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_secret(path, "second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept_secret(path) == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["password"]


def test_a_secret_is_written_by_several_at_once(tmp_path: Path) -> None:
    """Concurrent readers of a run write the users of its server."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: write_secret(tmp_path / "users.acl", str(number)), range(400)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["users.acl"]
