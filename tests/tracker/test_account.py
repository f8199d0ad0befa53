"""The exits of local processes are detected; processes on other machines or with a reused id are ignored."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from services.config import to_toml
from services.console.__main__ import main
from services.console.errors import EXIT_CONFIG
from services.operations import account
from services.protocol.messages import PodStatus
from services.runtime.activity import process_age_s
from services.runtime.atomic_folders import FolderError
from services.runtime.loops import Loop
from services.store import Store
from services.tracker.account import READS, UNREADABLE, Accountant, Neighbours
from tests.support.harness import small_config


def status(pid: int, age_s: float, host: str = "", **fields: object) -> PodStatus:
    """Return the status of a pod whose account starts with its process."""
    made = PodStatus(
        kind="generator", name="generator-0", boot="a", host=host or socket.gethostname(), pid=pid, url="", phase="", version=0,
        world=0, gauges={"devices": 1.0, "seconds/loading": age_s},
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def test_a_process_is_alive_until_it_exits() -> None:
    neighbours = Neighbours()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        neighbours.meet([(status(process.pid, process_age_s(process.pid) - 0.3), 0.3)])
        assert neighbours.left() == [("generator-0", "a")]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert neighbours.left() == [], "it is a zombie, but has exited"


def test_a_reused_process_id_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbours, parent = Neighbours(), os.getppid()
    neighbours.meet([(status(parent, process_age_s(parent)), 0.0)])
    assert neighbours.left() == [("generator-0", "a")]
    monkeypatch.setattr("services.tracker.account.process_age_s", lambda pid: process_age_s(pid) + 5.0)
    assert neighbours.left() == []


def test_other_processes_are_ignored() -> None:
    neighbours, parent = Neighbours(), os.getppid()
    age_s = process_age_s(parent)
    neighbours.meet([
        (status(parent, age_s, host="elsewhere"), 0.0),
        (status(parent, age_s + 5.0), 0.0),  # another process that reuses the id
        (status(os.getpid(), process_age_s()), 0.0),  # as in a container, where both have process id 1
        (status(parent, age_s, gauges={}), 0.0),  # holds no devices
    ])  # fmt: skip
    assert neighbours.left() == []
    neighbours.meet([(status(parent, age_s), 0.0)])
    assert neighbours.left() == [("generator-0", "a")]


async def follow_once(store: Store, folder: Path) -> None:
    """Account once for the fleet, with a tracker that is stopped at once."""
    stopping = asyncio.Event()
    stopping.set()
    accountant = Accountant(small_config(folder), store, folder, stopping)
    await accountant.follow(Loop("account", accountant.follow, 60))
    assert accountant.done.is_set()


async def test_an_unreadable_account_is_reported_and_reset(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("services.tracker.account.LOOK_S", 0.01)
    monkeypatch.setattr("services.tracker.account.OTHERS_S", 0.1)
    damaged = '{"pods": 1}'
    (tmp_path / account.FILE).write_text(damaged)
    (tmp_path / "config.toml").write_text(to_toml(small_config(tmp_path)))
    assert await asyncio.to_thread(main, ["cost", str(tmp_path)]) == EXIT_CONFIG
    assert "account.json cannot be read" in capsys.readouterr().err
    await store.fleet.beat(status(1, 5.0, host="elsewhere"), 60)
    with capture_logs() as logs:
        await follow_once(store, tmp_path)
    (warning,) = logs
    assert (warning["log_level"], warning["event"]) == ("warning", "starting a new account: earlier time is not included")
    assert "account.json cannot be read: Expected `object`, got `int`" in warning["error"]
    assert warning["moved_to"] == str(tmp_path / UNREADABLE)
    assert (tmp_path / UNREADABLE).read_text() == damaged
    assert [(name, pod.left) for name, pod in account.read(tmp_path).pods.items()] == [("generator-0", True)]


async def test_a_briefly_unreadable_account_is_continued(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.tracker.account.LOOK_S", 0.01)
    monkeypatch.setattr("services.tracker.account.OTHERS_S", 0.1)
    await store.fleet.beat(status(1, 5.0, host="elsewhere"), 60)
    await follow_once(store, tmp_path)
    before, real, failures = account.read(tmp_path), account.read, iter(range(READS - 1))

    def read(folder: Path) -> account.Account:
        if next(failures, None) is not None:
            raise FolderError("Stale file handle")
        return real(folder)

    monkeypatch.setattr(account, "read", read)
    await store.fleet.beat(status(1, 5.0, host="elsewhere", name="generator-1"), 60)
    with capture_logs() as logs:
        await follow_once(store, tmp_path)
    assert logs == []
    assert set(real(tmp_path).pods) == {*before.pods, "generator-1"}
    assert not (tmp_path / UNREADABLE).exists()
