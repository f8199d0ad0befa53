"""The processes of this machine are seen to end; those of other machines, and others of the same number, are not looked at."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
from structlog.testing import capture_logs

from services.config import to_toml
from services.console.__main__ import main
from services.console.errors import EXIT_CONFIG
from services.operations import account
from services.protocol.messages import PodStatus
from services.runtime.processes.activity import process_age_s
from services.tracker.account import Accountant, Neighbours
from tests.support.harness import small_config


def status(pid: int, age_s: float, host: str = "", **fields: object) -> PodStatus:
    """A pod whose process is as old as its account says."""
    made = PodStatus(
        kind="generator", name="generator-0", boot="a", host=host or socket.gethostname(), pid=pid, url="", phase="", version=0,
        world=0, gauges={"devices": 1.0, "seconds/loading": age_s},
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def test_a_process_is_there_until_it_has_ended() -> None:
    neighbours = Neighbours()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        neighbours.meet([(status(process.pid, process_age_s(process.pid) - 0.3), 0.3)])
        assert neighbours.left() == [("generator-0", "a")]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert neighbours.left() == [], "nobody has waited for it, but it has ended"


def test_another_process_with_the_number_of_one_that_has_ended_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbours, parent = Neighbours(), os.getppid()
    neighbours.meet([(status(parent, process_age_s(parent)), 0.0)])
    assert neighbours.left() == [("generator-0", "a")]
    monkeypatch.setattr("services.tracker.account.process_age_s", lambda pid: process_age_s(pid) + 5.0)
    assert neighbours.left() == []


def test_other_processes_are_not_looked_at() -> None:
    neighbours, parent = Neighbours(), os.getppid()
    age_s = process_age_s(parent)
    neighbours.meet([
        (status(parent, age_s, host="elsewhere"), 0.0),
        (status(parent, age_s + 5.0), 0.0),  # another process with its number
        (status(os.getpid(), process_age_s()), 0.0),  # as in a container, where both are the first
        (status(parent, age_s, gauges={}), 0.0),  # holds no devices
    ])  # fmt: skip
    assert neighbours.left() == []
    neighbours.meet([(status(parent, age_s), 0.0)])
    assert neighbours.left() == [("generator-0", "a")]


def test_an_account_that_cannot_be_read_is_said_to_and_begun_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accountant = Accountant(small_config(tmp_path), MagicMock(), tmp_path, asyncio.Event())
    with capture_logs() as logs:
        assert accountant._read() == account.Account(), "there is none"
        (tmp_path / account.FILE).write_text('{"pods": 1}')
        assert accountant._read() == account.Account()
    (warning,) = logs
    assert warning["log_level"] == "warning"
    assert "account.json cannot be read: Expected `object`, got `int`" in warning["error"]
    (tmp_path / "config.toml").write_text(to_toml(small_config(tmp_path)))
    assert main(["cost", str(tmp_path)]) == EXIT_CONFIG
    assert "account.json cannot be read" in capsys.readouterr().err
