"""Whole runs whose rollouts take several turns: killing what runs them changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.test_run import check_whole, finish, folder, kill, start, steps_done, wait_for, weights, write_run  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAMS = Path(__file__).parents[1] / "environment" / "programs.py"
STEPS = 5


def write(folder: Path, name: str) -> Path:  # noqa: F811
    source = f'{{kind = "jsonl", path = "{folder / "data.jsonl"}", environment = "digits"}}'
    return write_run(
        folder, name, f"data.sources=[{source}]", "verifiers=[]", "filters.exclude_pass_rate=0", "data.chat_template=true",
        f'environments=[{{name = "digits", kind = "python", function = "{PROGRAMS}:Digits"}}]', f"run.steps={STEPS}",
        "sampling.max_tokens=12",
    )  # fmt: skip


def test_killing_environments_and_generators_in_mid_run_changes_nothing(folder: Path) -> None:  # noqa: F811
    finish(start(write(folder, "turns")))
    check_whole(folder, "turns", STEPS)
    process = start(write(folder, "killed-turns"))
    wait_for(lambda: steps_done(folder, "killed-turns") >= 1, process)
    kill(folder, "killed-turns", "environment-0")
    kill(folder, "killed-turns", "generator-0")
    finish(process)
    check_whole(folder, "killed-turns", STEPS)
    assert weights(folder, "turns") == weights(folder, "killed-turns")
