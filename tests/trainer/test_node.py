"""A trainer pod: which ranks are its own, and what becomes of them when one fails or the pod is to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from services.protocol.config import ConfigError
from services.runtime.entry import Arguments
from services.runtime.units import PodPlan, Unit, UnitPlan
from services.trainer.node import Node, _see_through
from tests.harness import small_config

LAST = "import time; time.sleep(60)"
OBSTINATE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"


def unit(*programs: str, stop_s: float = 5.0) -> Unit:
    pods = tuple(PodPlan(f"rank-{i}", (sys.executable, "-c", program)) for i, program in enumerate(programs))
    return Unit(UnitPlan("trainer", pods, stop_s=stop_s))


def test_ranks_of_a_node_are_neighbours(tmp_path: Path) -> None:
    given = Arguments(small_config(tmp_path), "trainer-1", "/run/config.toml")
    node = Node.from_environment({"GRPO_NODE": "1", "GRPO_NODES": "2", "MASTER_ADDR": "first", "GRPO_STOP_S": "90"})
    plan = node.plan(8, given, given.path)
    assert plan.stop_s == 90
    assert [pod.name for pod in plan.pods] == ["trainer-1", "trainer-1.1", "trainer-1.2", "trainer-1.3"]
    assert [(pod.environ["RANK"], pod.environ["LOCAL_RANK"]) for pod in plan.pods] == [(str(4 + i), str(i)) for i in range(4)]
    assert {(pod.environ["WORLD_SIZE"], pod.environ["MASTER_ADDR"]) for pod in plan.pods} == {("8", "first")}
    assert plan.pods[0].argv[1:5] == ("-m", "services.trainer", "--config", "/run/config.toml")


@pytest.mark.parametrize(
    ("environ", "named"), [({"GRPO_NODE": "2", "GRPO_NODES": "2"}, "GRPO_NODE = 2"), ({"GRPO_NODES": "two"}, "are numbers")]
)
def test_a_wrong_place_is_refused(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Node.from_environment(environ)


def test_ranks_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    given = Arguments(small_config(tmp_path), "trainer-0", "")
    with pytest.raises(ConfigError, match=r"trainer.ranks = 3 cannot be shared out evenly"):
        replace(Node(0, 1, "here", 1.0), count=2).plan(3, given, "")


def test_one_that_fails_takes_the_others_along_and_its_code_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.node.LAST_WORDS_S", 0.2)
    started = unit(LAST, "raise SystemExit(3)")
    started.start(os.environ)
    try:
        assert _see_through(started) == 3
    finally:
        started.kill()
    assert all(code is not None for code in started.codes)
    killed = unit("import os; os.kill(os.getpid(), 9)")
    killed.start(os.environ)
    assert _see_through(killed) == 128 + signal.SIGKILL


def test_ranks_that_do_not_end_are_not_waited_for_longer_than_told() -> None:
    started = unit(OBSTINATE, stop_s=0.3)
    started.start(os.environ)
    try:
        started.terminate()
        began = time.monotonic()
        code = _see_through(started)
        assert time.monotonic() - began < 50
        assert code in (0, 1, 128 + signal.SIGTERM)
    finally:
        started.kill()


def test_the_entry_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    from services.protocol.config import to_toml

    (tmp_path / "run.toml").write_text(to_toml(small_config(tmp_path)))
    environ = {**os.environ, "GRPO_CONFIG": str(tmp_path / "run.toml"), "GRPO_NODE": "5", "GRPO_NODES": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "services.trainer.node"], env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (2, "error: GRPO_NODE = 5 is none of GRPO_NODES = 2 nodes: they count from 0\n")
