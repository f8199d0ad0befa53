"""A whole run whose reward service misbehaves, is killed and restarted: nothing changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.whole_runs import (
    Hold,
    check_whole,
    finish,
    kill,
    pids_of,
    start,
    steps_done,
    wait_for,
    weights,
    write_run,
)
from tests.verifiers.remote.flaky_server import FlakyServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAME = "rewarded"


def status(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "services.console.commands", "status", str(folder / NAME), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


def generators(folder: Path) -> list[dict[str, Any]]:
    return [pod for pod in json.loads(status(folder, "--json"))["pods"] if pod["kind"] == "generator"]


def test_restarting_the_reward_service_changes_nothing(folder: Path, undisturbed: str) -> None:
    """It returns the same scores as the undisturbed run's own verifier, so the weights must be equal."""
    with FlakyServer() as service:
        service.behave("status:500", "hang", "close", "raw:{}", "retry:1", "endless", "status:503")
        verifier = f'{{kind="http", url="{service.url}/digits", range=[0, 1], timeout_s=1.0}}'
        hold = Hold(folder, NAME)
        process = start(write_run(folder, NAME, hold.option, f"verifiers=[{verifier}]"))
        hold.reach(2, process)
        service.kill()
        hold.release()
        wait_for(lambda: f"waiting for verifier 'http' at {service.url}/digits: connection refused" in status(folder), process)
        waiting = next(pod for pod in generators(folder) if pod["waiting"])
        ready = httpx.get(f"{waiting['url']}/health/ready", timeout=60)
        assert ready.status_code == 503
        assert "waiting for verifier 'http'" in ready.text
        done = steps_done(folder, NAME)
        before = pids_of(folder, NAME, "generator-0")
        kill(folder, NAME, "generator-0", process)
        wait_for(lambda: bool({*pids_of(folder, NAME, "generator-0")} - {*before}), process)
        wait_for(lambda: any(pod["waiting"] for pod in generators(folder)), process)  # the other one may hold all tickets by now
        assert steps_done(folder, NAME) <= done + 2, "only groups scored before can be trained"
        service.start()
        finish(process)
        assert service.requests
    check_whole(folder, NAME)
    assert weights(folder, NAME) == undisturbed
