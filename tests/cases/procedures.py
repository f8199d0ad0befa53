"""Cases that describe a procedure: each has a test of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NODES: dict[str, str] = {
    "stop-01": "tests/generator/test_stop_strings.py::test_a_stop_string_ends_a_completion",
    "stop-02": "tests/generator/test_stop_strings.py::test_a_stop_string_ends_a_completion",
    "own-01": "tests/console/doctor/test_own_answers.py::test_own_answers_that_are_right_are_counted",
    "own-02": "tests/console/doctor/test_own_answers.py::test_answers_that_no_completion_can_have_are_a_problem",
    "own-03": "tests/console/doctor/test_own_answers.py::test_an_answer_that_cannot_be_parsed_is_named_with_its_row",
    "cfg-01": "tests/console/doctor/test_model_files.py::test_targets_of_adapters_are_compared_with_the_layers",
    "cfg-02": "tests/config/test_model_files.py::test_an_adapter_is_refused_with_the_way_to_merge_it",
    "cfg-03": "tests/trainer/step/test_deepspeed_engine.py::test_the_learning_rate_never_rises_when_a_run_is_extended",
    "net-01": "tests/confined/test_confine.py::test_a_worker_reaches_the_loopback_interface_past_any_proxy",
    "net-02": "tests/generator/test_drain.py::test_a_working_pod_has_exited_when_the_hook_returns",
    "door-90": "",
    "wb-01": "tests/tracker/test_follower.py::test_both_trackers_survive_a_kill_without_loss",
}
"""Id of a case -> the test that carries it out, as pytest names it; empty: there is none yet."""
KINDS = {
    "stop strings": "stop-01",
    "gold answers before the run": "own-01",
    "found by the trainer only": "cfg-01",
    "adapter as the model": "cfg-02",
    "schedule of an extended run": "cfg-03",
    "proxies and the loopback interface": "net-01",
    "log-probabilities": "door-90",
    "a run in two folders": "wb-01",
}
"""Kind -> the case whose test stands for others of this kind."""
ROOT = Path(__file__).parents[2]


def attempt(node: str) -> tuple[str, bool]:
    """Run the test of a case; return the last line of its report, and whether it passed."""
    if not node:
        return "not tried: there is no test of it yet", False
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", node]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1], done.returncode == 0
