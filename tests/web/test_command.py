"""`grpo run --web` and `grpo web`: fake services, a real page."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from services.config import load_resolved
from services.console.commands.web import web
from services.console.errors import ConsoleError
from services.console.lock import FolderLock
from services.console.run.plan import plan_units
from services.console.run.redis_server import RedisServer
from services.http.credentials import api_tokens
from services.store import Store
from tests.support.console import LIMIT_S, config_file, environment, grpo, launched, log, processes_of, steps, wait_until
from tests.support.harness import small_config


def test_the_page_is_an_optional_unit(tmp_path: Path) -> None:
    assert not any(unit.stays for unit in plan_units(small_config(tmp_path), Path("c")))
    (unit,) = [unit for unit in plan_units(small_config(tmp_path, None, "web.port=8265"), Path("c")) if unit.stays]
    assert (unit.name, unit.essential) == ("web-0", False)
    assert "services.web" in unit.pods[0].argv


def test_a_run_serves_its_page_and_stops_it_afterwards(tmp_path: Path) -> None:
    with launched("run", config_file(tmp_path), "run.steps=100000", "generator.count=1", "--web") as console:
        wait_until(lambda: "up at" in log(tmp_path / "small", "web-0"), "the page: a run may end before it is served")
        assert grpo("stop", tmp_path / "small", "--yes").returncode == 0
        output, errors = console.communicate(timeout=LIMIT_S)
    assert console.returncode == 0, errors
    assert re.search(r"web console: http://127\.0\.0\.1:\d+, with the token in .*/token", output)
    assert "still running after the end" not in output
    assert processes_of(tmp_path / "small") == {}


def test_grpo_web_shows_a_finished_run_and_names_a_port_in_use(tmp_path: Path) -> None:
    assert grpo("run", config_file(tmp_path), "run.steps=4", "generator.count=1").returncode == 0
    run = tmp_path / "small"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = grpo("web", run, "--port", str(port))
        assert (done.returncode, f"web.port = {port}" in done.stderr) == (2, True), done.stderr
    command = [sys.executable, "-m", "services.console.commands", "web", str(run)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "run small: finished\n"
        link = re.search(r"to control it: +(http://127\.0\.0\.1:\d+)/#token=(\S+)", process.stdout.readline())
        assert link
        assert link[2] == api_tokens(load_resolved(run / "config.toml")).operate
        assert f"#token={(run / 'api-read-token').read_text().strip()}" in process.stdout.readline()
        token = {"Authorization": f"Bearer {(run / 'api-read-token').read_text().strip()}"}
        with httpx.Client(base_url=link[1], headers=token, timeout=LIMIT_S) as http:
            found = http.get("/v1/console/series").json()
            assert found["steps"] == [0, 1, 2, 3]
            assert http.get("/v1/state").json()["state"]["finished"] == "trained 4 of 4 steps"
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    wait_until(lambda: processes_of(run) == {}, "its Redis is gone again")
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert (process.wait(LIMIT_S), process.stdout.read()) == (0, "")
    assert (found["run"], found["condition"]) == ("small", "finished")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", found["url"])
    assert found["control"] == f"{found['url']}/#token={api_tokens(load_resolved(run / 'config.toml')).operate}"
    assert found["view"] == f"{found['url']}/#token={(run / 'api-read-token').read_text().strip()}"


async def test_grpo_web_without_the_runs_folder_is_an_error(
    server: RedisServer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_REDIS_PASSWORD", server.password)
    with pytest.raises(ConsoleError, match="needs its folder"):
        await web(store.keys.name, server.url, "", 0, False)


def test_grpo_web_follows_a_run_that_starts_and_stops(tmp_path: Path) -> None:
    file, run = config_file(tmp_path), tmp_path / "small"
    with launched("run", file, "run.steps=300", "generator.count=1", FAKE_STEP_S="0.1") as console:
        wait_until(lambda: len(steps(run)) > 2, "the first steps")
        page = subprocess.Popen(
            [sys.executable, "-m", "services.console.commands", "web", str(run)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=tmp_path,
        )  # fmt: skip
        with page:
            assert page.stdout is not None
            assert page.stdout.readline() == "run small: running\n"
            link = re.search(r"(http://\S+)/#token=(\S+)", page.stdout.readline())
            assert link
            http = httpx.Client(base_url=link[1], headers={"Authorization": f"Bearer {link[2]}"}, timeout=LIMIT_S)

            def word() -> str:
                with contextlib.suppress(httpx.TransportError), http.stream("GET", "/v1/console/live") as frames:
                    lines = (line for line in frames.iter_lines() if line.startswith("data: "))
                    return json.loads(next(lines, "data: {}").removeprefix("data: ")).get("condition", {}).get("word", "")
                return ""

            assert word() == "running"
            console.send_signal(signal.SIGINT)
            console.communicate(timeout=LIMIT_S)
            wait_until(lambda: word() == "stopped", "the page reads the stopped run")
            assert grpo("status", run).returncode == 0
            more = grpo("run", file, "run.steps=300", "generator.count=1", FAKE_STEP_S="0.01")
            assert more.returncode == 0, more.stderr
            wait_until(lambda: word() == "finished", "the page reads the finished run")
            http.close()
            page.send_signal(signal.SIGTERM)
            assert page.wait(LIMIT_S) == 0
    wait_until(lambda: processes_of(run) == {}, "its Redis is gone again")


def test_grpo_web_stays_while_a_run_is_started_over(tmp_path: Path) -> None:
    """`--fresh` deletes the old configuration before it writes the new one."""
    assert grpo("run", config_file(tmp_path), "run.steps=4", "generator.count=1").returncode == 0
    run = tmp_path / "small"
    command = [sys.executable, "-m", "services.console.commands", "web", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path) as page:
        assert page.stdout is not None
        assert page.stdout.readline() == "run small: finished\n"
        with FolderLock(run):
            away = (run / "config.toml").rename(tmp_path / "away.toml")
            with pytest.raises(subprocess.TimeoutExpired):
                page.wait(3)
            away.rename(run / "config.toml")
        page.send_signal(signal.SIGTERM)
        assert page.wait(LIMIT_S) == 0
