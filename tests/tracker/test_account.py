"""The processes of this machine are seen to end; those of other machines, and others of the same number, are not looked at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec
import pytest

from services.protocol.messages import PodStatus
from services.runtime.processes.activity import process_age_s
from services.tracker.account import Neighbours


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
