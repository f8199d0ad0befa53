"""A trainer pod: which ranks it runs, and what happens when one fails or the pod is terminated."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from services.config import ConfigError, RunConfig, to_toml
from services.console.run.redis_server import RedisServer
from services.http.entry import Arguments
from services.runtime.child_processes import ChildService, ProcessPlan, ServicePlan, rank_environment
from services.runtime.exits import EXIT_UNLOADED
from services.store import Store
from services.trainer.node import TrainerNode, _see_through
from tests.support.harness import small_config, wait_until

LAST = "import time; time.sleep(60)"
OBSTINATE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"


RANK = """
import ctypes, signal, sys, time
from services.trainer import __main__ as trainer
def load(*_):
    print("loading", flush=True)
    if how == "meeting":  # Python runs no handler while ranks meet, or in a lock that is never released
        lock = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(lock)
    time.sleep(300)
trainer._worker = load
how = sys.argv.pop()
sys.exit(trainer.main())
"""


def child(*programs: str, stop_s: float = 5.0) -> ChildService:
    pods = tuple(ProcessPlan(f"rank-{i}", (sys.executable, "-c", program)) for i, program in enumerate(programs))
    return ChildService(ServicePlan("trainer", pods, stop_s=stop_s))


def test_ranks_of_a_node_are_consecutive(tmp_path: Path) -> None:
    given = Arguments(small_config(tmp_path), "trainer-1", "/run/config.toml")
    node = TrainerNode.from_environment({"GRPO_NODE": "1", "GRPO_NODES": "2", "MASTER_ADDR": "first", "GRPO_STOP_S": "90"})
    plan = node.plan(8, given, given.path)
    assert plan.stop_s == 90
    assert [pod.name for pod in plan.pods] == ["trainer-1", "trainer-1.1", "trainer-1.2", "trainer-1.3"]
    assert [(pod.environ["RANK"], pod.environ["LOCAL_RANK"]) for pod in plan.pods] == [(str(4 + i), str(i)) for i in range(4)]
    assert {(pod.environ["WORLD_SIZE"], pod.environ["MASTER_ADDR"]) for pod in plan.pods} == {("8", "first")}
    assert plan.pods[0].argv[1:5] == ("-m", "services.trainer", "--config", "/run/config.toml")


@pytest.mark.parametrize(
    ("environ", "named"), [({"GRPO_NODE": "2", "GRPO_NODES": "2"}, "GRPO_NODE = 2"), ({"GRPO_NODES": "two"}, "must be numbers")]
)
def test_an_invalid_node_number_is_rejected(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TrainerNode.from_environment(environ)


def test_an_uneven_number_of_ranks_is_rejected(tmp_path: Path) -> None:
    given = Arguments(small_config(tmp_path), "trainer-0", "")
    with pytest.raises(ConfigError, match=r"trainer.ranks = 3 must be a multiple of"):
        replace(TrainerNode(0, 1, "here", 1.0), count=2).plan(3, given, "")


def test_a_failed_rank_stops_the_others_and_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.node.LAST_WORDS_S", 0.2)
    started = child(LAST, "raise SystemExit(3)")
    started.start(os.environ)
    try:
        assert _see_through(started) == 3
    finally:
        started.kill()
    assert all(code is not None for code in started.codes)
    for sig in (signal.SIGKILL, signal.SIGTERM):  # sent by nobody here
        killed = child(f"import os; os.kill(os.getpid(), {sig:d})")
        killed.start(os.environ)
        assert _see_through(killed) == 128 + sig


def test_ranks_are_killed_after_the_stop_timeout() -> None:
    started = child(OBSTINATE, stop_s=0.3)
    started.start(os.environ)
    try:
        started.terminate()
        began = time.monotonic()
        code = _see_through(started)
        assert time.monotonic() - began < 50
        assert code in (EXIT_UNLOADED, 1)
    finally:
        started.kill()


def loading_rank(rank: int, how: str) -> ProcessPlan:
    argv = (sys.executable, "-c", RANK, "--name", f"trainer-{rank}", how)
    return ProcessPlan(f"rank-{rank}", argv, rank_environment(rank, rank, 2, "127.0.0.1"))


async def started(ranks: ChildService, folder: Path, config: RunConfig) -> ChildService:
    """Start ranks and wait until they load."""
    (folder / "run.toml").write_text(to_toml(config))
    ranks.start({**os.environ, "GRPO_CONFIG": str(folder / "run.toml")})
    await wait_until(lambda: all(pod.log and "loading\n" in pod.log.read_text() for pod in ranks.pods))
    return ranks


async def test_ranks_terminated_while_loading_exit_at_once(server: RedisServer, store: Store, tmp_path: Path) -> None:
    ranks = ChildService(ServicePlan("trainer", (loading_rank(0, "meeting"), loading_rank(1, "meeting")), stop_s=60), tmp_path)
    try:
        await started(ranks, tmp_path, small_config(tmp_path, server, f"run.name={store.keys.name}"))
        ranks.terminate()
        assert await asyncio.to_thread(_see_through, ranks) == EXIT_UNLOADED
        await wait_until(lambda: not ranks.alive)
        assert ranks.codes == [-signal.SIGTERM] * 2
    finally:
        ranks.kill()


async def test_ctrl_c_while_ranks_load_is_no_error(server: RedisServer, store: Store, tmp_path: Path) -> None:
    ranks = ChildService(ServicePlan("trainer", (loading_rank(0, ""), loading_rank(1, ""))), tmp_path)
    try:
        await started(ranks, tmp_path, small_config(tmp_path, server, f"run.name={store.keys.name}"))
        for pod in ranks.pods:
            os.kill(pod.pid, signal.SIGINT)
        await wait_until(lambda: not ranks.alive)
        assert ranks.codes == [0, 0]
        log = "".join(pod.log.read_text() for pod in ranks.pods if pod.log)
        assert "Traceback" not in log
        assert "Task was destroyed" not in log
    finally:
        ranks.kill()


def test_a_pod_terminated_before_its_ranks_start_exits_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(small_config(tmp_path)))
    program = (
        "import sys, time\nfrom services.trainer import node\n"
        "def wait(_):\n    print('waiting', flush=True)\n    time.sleep(300)\n"
        "node._await_name = wait\nsys.exit(node.main())"
    )
    environ = {**os.environ, "GRPO_CONFIG": str(tmp_path / "run.toml")}
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert any(line == b"waiting\n" for line in process.stdout)
            process.terminate()
            assert process.wait(60) == EXIT_UNLOADED
        finally:
            process.kill()


def test_a_startup_error_is_reported_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(small_config(tmp_path)))
    environ = {**os.environ, "GRPO_CONFIG": str(tmp_path / "run.toml"), "GRPO_NODE": "5", "GRPO_NODES": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "services.trainer.node"], env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (2, "error: GRPO_NODE = 5 must be between 0 and GRPO_NODES - 1 = 1\n")
