"""`grpo run` end to end: the console, Redis and all processes are real; only the services are fake."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.config import load_resolved
from services.console.commands.__main__ import main
from services.console.run.redis_server import RedisServer
from services.store import Store
from tests.support.console import (
    LIMIT_S,
    ROOT,
    command,
    config_file,
    environment,
    grpo,
    launched,
    lives,
    log,
    processes_of,
    steps,
    wait_until,
)


def test_a_run_finishes_and_writes_its_results(tmp_path: Path) -> None:
    file, run = config_file(tmp_path), tmp_path / "small"
    done = grpo("run", file, "run.steps=12", "generator.count=2", "trainer.ranks=2", FAKE_REPORT="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert sum(line.startswith("step ") for line in done.stdout.splitlines()) == 12
    assert "finished: run small" in done.stdout
    assert steps(run) == list(range(12))
    assert processes_of(run) == {}
    summary = json.loads((run / "summary.json").read_text())
    expected = {
        "run": "small", "status": "finished", "steps": 12, "seed": 0, "lost": 0, "doubled": 0, "stale_dropped": 0, "max_lag": 1.0,
        "generators": 2, "restarts": {"dataprep-0": 0, "trainer": 0, "generator-0": 0, "generator-1": 0, "redis": 0},
    }  # fmt: skip
    assert expected.items() <= summary.items()
    assert abs(summary["reward_first"] - sum(range(6)) / 72) < 1e-9  # means of step / 12 over half of the steps
    assert abs(summary["reward_last"] - sum(range(6, 12)) / 72) < 1e-9
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    config = load_resolved(run / "config.toml")
    assert config.redis.url.startswith("redis://127.0.0.1:")
    assert config.sync.host == "127.0.0.1"
    assert stat.S_IMODE((run / "redis" / "password").stat().st_mode) == 0o600

    again = grpo("run", file, "run.steps=12", "generator.count=2", "trainer.ranks=2")
    assert (again.returncode, "has already finished" in again.stdout) == (0, True)
    other = grpo("run", file, "run.steps=12", "run.seed=13", "generator.count=2", "trainer.ranks=2")
    assert other.returncode == 2
    assert "run.seed is 0 there and 13 here" in other.stderr
    assert "--fresh" in other.stderr
    more = grpo("run", file, "run.steps=14", "generator.count=2", "trainer.ranks=2")
    assert (more.returncode, steps(run)) == (0, list(range(14))), more.stderr
    assert "changed from step 12 on: run.steps from 12 to 14" in more.stdout
    (line,) = (run / "changes.jsonl").read_text().splitlines()
    assert json.loads(line)["changes"] == {"run.steps": [12, 14]}
    kept = (run / "config.toml").read_bytes()
    less = grpo("run", file, "run.steps=13", "generator.count=2", "trainer.ranks=2", "filters.zero_std=true")
    assert (less.returncode, "run.steps = 13, but the run has trained 14: raise it" in less.stderr) == (2, True)
    assert (run / "config.toml").read_bytes() == kept, "a rejected change is not written"
    assert len((run / "changes.jsonl").read_text().splitlines()) == 1
    assert main(["audit", str(run)]) == 0
    assert processes_of(run) == {}


def test_killed_services_and_redis_are_restarted(tmp_path: Path) -> None:
    file, run = config_file(tmp_path), tmp_path / "small"
    arguments = ("run", file, "--no-screen", "run.steps=60", "generator.count=1", "trainer.ranks=2")
    with launched(*arguments, FAKE_STEP_S="0.1", FAKE_CHILD="generator-0") as console:
        wait_until(lambda: len(steps(run)) > 2 and "child " in log(run, "generator-0"), "the first steps")
        before = processes_of(run)
        assert set(before) == {"dataprep-0", "generator-0", "trainer-0", "trainer-1", "redis"}
        child = int(log(run, "generator-0").split("child ")[1].split()[0])
        for pod in ("generator-0", "trainer-1", "redis"):
            os.kill(before[pod], signal.SIGKILL)
        now = wait_until(
            lambda: (
                (now := processes_of(run))
                and set(now) == set(before)
                and all(now[pod] != before[pod] for pod in ("generator-0", "trainer-0", "trainer-1", "redis"))
                and now
            ),
            "each must be a new process",
        )
        assert now["dataprep-0"] == before["dataprep-0"]
        wait_until(lambda: not lives(child), "a killed service's child to end")
        output, _ = console.communicate(timeout=LIMIT_S)
    assert console.returncode == 0
    assert "Redis died and was restarted" in output
    ports = [line for line in log(run, "trainer-0").splitlines() if line.startswith("up at")]
    assert len(set(ports)) == 2
    assert ports == [line for line in log(run, "trainer-1").splitlines() if line.startswith("up at")]
    assert steps(run) == list(range(60))
    restarts = json.loads((run / "summary.json").read_text())["restarts"]
    assert restarts == {"dataprep-0": 0, "trainer": 1, "generator-0": 1, "redis": 1}


IN_A_HOOK = """
import os, runpy, signal
presses = iter([signal.SIGINT])
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), next(presses, 0)))  # of the first fork
runpy.run_module("tests.console.run.launch", run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_is_not_lost_while_a_run_starts(tmp_path: Path) -> None:
    """Python ignores the KeyboardInterrupt of a Ctrl-C that arrives during an at-fork hook."""
    file, run = config_file(tmp_path), tmp_path / "small"
    argv = [sys.executable, "-c", IN_A_HOOK, "run", str(file), "--no-screen", "run.steps=30"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False, cwd=ROOT)
    assert "Exception ignored in" in done.stderr
    assert (done.returncode, processes_of(run), steps(run)) == (130, {}, [])


def test_ctrl_c_stops_and_the_same_command_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = config_file(tmp_path), tmp_path / "small"
    with launched("run", file, "run.steps=300", FAKE_STEP_S="0.1") as console:
        wait_until(lambda: len(steps(run)) > 2, "the first steps")
        busy = grpo("run", file, "run.steps=300", "--fresh")
        assert busy.returncode == 2
        assert f"in use by process {console.pid}" in busy.stderr
        live = grpo("pause", run, "--role", "dataprep", "--why", "lunch")
        assert live.stdout == "run small: dataprep paused\n"
        console.send_signal(signal.SIGINT)
        output, errors = console.communicate(timeout=LIMIT_S)
    assert (console.returncode, errors) == (130, "")
    assert "resume it with: grpo run" in output
    assert processes_of(run) == {}
    with (run / "metrics.jsonl").open("a") as file_:
        file_.write('{"step": 9')  # as a killed console leaves it
    assert main(["status", str(run)]) == main(["resume", str(run)]) == 0
    shown = capsys.readouterr().out
    assert ": lunch" in shown
    assert "applies this when it resumes" in shown
    done = grpo("run", file, "run.steps=300", FAKE_STEP_S="0.01")
    assert (done.returncode, done.stderr) == (0, "")
    assert "resuming after" in done.stdout
    assert steps(run) == list(range(300))
    fresh = grpo("run", file, "run.steps=3", "--fresh")
    assert (fresh.returncode, steps(run)) == (0, [0, 1, 2])


def test_waiting_at_the_end_names_pods_and_time_limit(tmp_path: Path) -> None:
    file, run = config_file(tmp_path), tmp_path / "small"
    with launched("run", file, "--no-screen", "run.steps=2", FAKE_DEAF="generator-0") as console:
        assert console.stdout is not None
        others = r".*\bgenerator-0\b"  # on a busy machine, others may still be running
        for message in (rf"waiting up to 25 s for {others}.* to exit", rf"still running after the end of the run: {others}"):
            assert any(re.search(message, line) for line in console.stdout), message
            console.send_signal(signal.SIGINT)
        assert "finished: run small" in console.stdout.read()
        assert console.wait(LIMIT_S) == 0
    assert processes_of(run) == {}


def test_generators_are_scaled_up_and_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A draining generator that ignores SIGTERM is killed, which is not a crash. The latest request survives a restart."""
    file, run = config_file(tmp_path), tmp_path / "small"
    arguments = ("run", file, "run.steps=1000", "generator.count=1", "generator.drain_s=0", "--no-screen")

    def generators() -> set[str]:
        return {pod for pod in processes_of(run) if pod.startswith("generator")}

    def scale(*given: str) -> str:
        capsys.readouterr()
        assert main(["scale", "generators", given[0], str(run), *given[1:]]) == 0
        return capsys.readouterr().out

    with launched(*arguments, FAKE_STEP_S="0.1", FAKE_DEAF="generator-2") as console:
        wait_until(lambda: len(steps(run)) > 1, "the first steps")
        assert scale("3", "--why", "day") == "run small: desired generators set to 3\n"
        wait_until(lambda: len(generators()) == 3 and "deaf" in log(run, "generator-2"), "three generators")
        first = processes_of(run)["generator-0"]
        expected = f"generators: 2 running, 3 desired ({getpass.getuser()}: day)"
        wait_until(lambda: main(["status", str(run)]) == 0 and expected in capsys.readouterr().out, expected)
        assert main(["resume", str(run), "--why", "checked"]) == main(["status", str(run)]) == 0
        assert f"resumed by {getpass.getuser()}: checked, 20" in capsys.readouterr().out
        assert scale("0") == "run small: desired generators set to 0; the run waits until there is one\n"
        wait_until(lambda: generators() <= {"generator-2"}, "all gone but the deaf one, which is killed soon")
        scale("5")
        scale("2")
        now = wait_until(lambda: generators() == {"generator-0", "generator-1"} and processes_of(run), "two of them")
        assert now["generator-0"] != first
        console.send_signal(signal.SIGINT)
        output, errors = console.communicate(timeout=LIMIT_S)
    assert (console.returncode, errors) == (130, "")
    assert "generator-2 did not stop within 5 s: killing it" in output
    assert "generator-0 drained and exited" in output
    assert "restarting" not in output
    with launched(*arguments, FAKE_STEP_S="0.1") as console:
        wait_until(lambda: len(generators()) == 2, "as many as were wanted last")
        for wrong, why in (
            (("generators", "-1"), "-1"),
            (("trainers", "2"), "trainers"),
            (("generators", "10001"), "more than 10000"),
        ):
            assert main(["scale", *wrong, str(run)]) == 2
            assert why in capsys.readouterr().err
        assert main(["stop", str(run)]) == 0
        console.send_signal(signal.SIGINT)
        console.communicate(timeout=LIMIT_S)
    restarts = json.loads((run / "summary.json").read_text())["restarts"]
    assert set(restarts.values()) == {0}


def test_killing_the_console_ends_its_services(tmp_path: Path) -> None:
    file, run = config_file(tmp_path), tmp_path / "small"
    with launched("run", file, "run.steps=1000", "generator.drain_s=0", FAKE_DEAF="generator-0") as console:
        wait_until(lambda: len(steps(run)) > 2 and "deaf" in log(run, "generator-0"), "the first steps")
        console.kill()
        deaf = wait_until(lambda: len(left := processes_of(run)) == 1 and left.get("generator-0"), "all but the deaf one gone")
        os.kill(deaf, signal.SIGKILL)
    with launched("run", file, "run.steps=1000", "generator.drain_s=0", FAKE_DEAF="generator-0") as console:
        reached = len(steps(run))
        wait_until(lambda: len(steps(run)) > reached + 2 and log(run, "generator-0").count("deaf") == 2, "further steps")
        console.send_signal(signal.SIGTERM)
        wait_until(lambda: set(processes_of(run)) <= {"generator-0", "redis"}, "the others to end")
        console.send_signal(signal.SIGTERM)
        console.communicate(timeout=LIMIT_S)
    assert console.returncode == 130
    assert processes_of(run) == {}
    assert steps(run) == list(range(len(steps(run))))


def test_a_terminal_shows_the_live_screen(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    arguments = command("run", config_file(tmp_path), "run.steps=3")
    console = subprocess.Popen(arguments, stdout=end, stderr=end, env=environment(TERM="xterm"), cwd=ROOT)
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal raises this once its writer has closed it
        while chunk := os.read(terminal, 65536):
            shown += chunk
    os.close(terminal)
    assert console.wait(timeout=LIMIT_S) == 0
    assert b"3/3 steps" in shown
    assert b"heartbeat" in shown
    assert b"\x1b[?25h" in shown, "the cursor is not restored"


def test_a_configuration_error_of_a_service_ends_the_run(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    done = grpo("run", file, FAKE_EXIT="dataprep-0:2:path of source 'main' = 'x' is not a file")
    assert done.returncode == 2
    log_path = tmp_path / "small" / "logs" / "dataprep-0.log"
    assert done.stderr == f"error: dataprep-0 cannot run: path of source 'main' = 'x' is not a file (log: {log_path})\n"
    assert processes_of(tmp_path / "small") == {}


def test_a_service_that_keeps_crashing_ends_the_run(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    done = grpo("run", file, "run.steps=300", FAKE_STEP_S="60", FAKE_EXIT="generator-0:1:the engine is broken")
    assert done.returncode == 1
    assert "generator-0 died of the same error 2 times in a row: the engine is broken (log: " in done.stderr
    assert json.loads((tmp_path / "small" / "summary.json").read_text())["status"] == "failed"


def test_a_requested_restore_is_not_a_failure(tmp_path: Path) -> None:
    file, run = config_file(tmp_path), tmp_path / "small"
    with launched("run", file, "--no-screen", "run.steps=120", FAKE_STEP_S="0.1") as console:
        wait_until(lambda: len(steps(run)) > 2, "the first steps")

        async def request() -> None:
            config = load_resolved(run / "config.toml")
            store = await Store.connect(config.redis.url, "small", (run / "redis" / "password").read_text().strip())
            await store.run.request_restore(1, "ada: a spike")
            await store.close()

        asyncio.run(request())
        output, errors = console.communicate(timeout=LIMIT_S)
    assert (console.returncode, errors) == (0, "")
    assert "restoring the checkpoint of step 1, requested by ada: a spike" in output
    assert "the trainer restarts to restore the checkpoint of step 1" in output
    assert "failed" not in output
    assert json.loads((run / "summary.json").read_text())["restarts"]["trainer"] == 0


async def forget(server: RedisServer, run: str) -> None:
    """Delete the run from the shared server."""
    store = await Store.connect(server.url, run, server.password)
    await store.restores.delete_run()
    await store.close()


def test_two_runs_on_two_kinds_of_redis_run_side_by_side(
    tmp_path: Path, server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path)
    shared = server.url.replace("redis://", f"redis://:{server.password}@")
    with (
        launched("run", file, "run.name=one", "run.steps=8") as one,
        launched("run", file, "run.name=two", "run.steps=8", "--redis-url", shared) as two,
    ):
        (_, first), (_, second) = one.communicate(timeout=LIMIT_S), two.communicate(timeout=LIMIT_S)
    assert (one.returncode, two.returncode) == (0, 0), first + second
    assert steps(tmp_path / "one") == steps(tmp_path / "two") == list(range(8))
    assert load_resolved(tmp_path / "two" / "config.toml").redis.url == server.url  # without the password
    assert stat.S_IMODE((tmp_path / "two" / "redis-password").stat().st_mode) == 0o600
    assert main(["status", "two", "--redis-url", shared, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"]["finished"] == "trained 8 of 8 steps"
    other = grpo("run", file, "run.name=two", "run.seed=9", "--redis-url", shared, f'run.dir="{tmp_path}/elsewhere"')
    assert other.returncode == 2
    assert "with another configuration" in other.stderr
    assert not (tmp_path / "elsewhere" / "two").exists()
    (tmp_path / "elsewhere" / "two").mkdir(parents=True)
    (tmp_path / "elsewhere" / "two" / "notes.txt").write_text("not of a run")
    foreign = grpo("run", file, "run.name=two", "--fresh", "--redis-url", shared, f'run.dir="{tmp_path}/elsewhere"')
    assert (foreign.returncode, "it contains notes.txt but no run" in foreign.stderr) == (2, True), foreign.stderr
    assert main(["status", "two", "--redis-url", shared, "--json"]) == 0, "nothing was deleted in Redis"
    fresh = grpo("run", file, "run.name=two", "run.steps=2", "--fresh", "--redis-url", shared)
    assert (fresh.returncode, steps(tmp_path / "two")) == (0, [0, 1]), fresh.stderr
    asyncio.run(forget(server, "two"))
