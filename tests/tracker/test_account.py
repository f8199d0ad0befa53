"""The tracker keeps the account of a run in its folder, whatever state the file is in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.config import to_toml
from services.console.commands.__main__ import main
from services.console.errors import EXIT_CONFIG
from services.operations.cost import FILE, read_account
from services.protocol.messages import PodStatus
from services.runtime.atomic_folders import FolderError
from services.runtime.loops import Loop
from services.store import Store
from services.tracker import account
from tests.support.harness import small_config


def status(name: str) -> PodStatus:
    gauges = {"devices": 1.0, "seconds/loading": 5.0}
    return PodStatus("generator", name, "a", "here", 1, "", "", 0, 0, gauges)


async def follow_once(store: Store, folder: Path) -> None:
    """Account once for the fleet, with a tracker that is stopped at once."""
    stopping, done = asyncio.Event(), asyncio.Event()
    stopping.set()

    async def never(_: Loop) -> None: ...

    await account.keep_account(small_config(folder), store, folder, stopping, done, Loop("account", never, 60))
    assert done.is_set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "LOOK_S", 0.01)
    monkeypatch.setattr(account, "OTHERS_S", 0.1)


async def test_a_damaged_account_is_reported_and_reset(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE).write_text('{"processes": 1}')
    (tmp_path / "config.toml").write_text(to_toml(small_config(tmp_path)))
    assert await asyncio.to_thread(main, ["cost", str(tmp_path)]) == EXIT_CONFIG
    assert "account.json cannot be read" in capsys.readouterr().err
    await store.fleet.beat(status("generator-0"), 60)
    with capture_logs() as logs:
        await follow_once(store, tmp_path)
    assert [log["event"] for log in logs] == ["starting a new account: earlier time is not included"]
    assert {key: each.left for key, each in read_account(tmp_path).processes.items()} == {"generator-0:a": True}


async def test_an_account_is_continued_once_it_can_be_read(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.fleet.beat(status("generator-0"), 60)
    await follow_once(store, tmp_path)
    await store.fleet.beat(status("generator-1"), 60)
    with monkeypatch.context() as outage:
        outage.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        with pytest.raises(FolderError, match="Stale file handle"):
            await follow_once(store, tmp_path)
    await follow_once(store, tmp_path)
    assert set(read_account(tmp_path).processes) == {"generator-0:a", "generator-1:a"}
