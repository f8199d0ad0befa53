"""Whole runs with multi-turn rollouts: killing the pods that run them changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.whole_runs import Hold, check_whole, finish, kill, start, weights, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAMS = Path(__file__).parents[2] / "environment" / "support" / "programs.py"
STEPS = 5


def write(folder: Path, name: str, *overrides: str) -> Path:
    source = f'kind = "jsonl", path = "{folder / "data.jsonl"}", environment = "digits"'
    return write_run(
        folder, name, f"data.sources=[{{{source}}}]", "verifiers=[]", "filters.exclude_pass_rate=0", "data.chat_template=true",
        f'environments=[{{name = "digits", kind = "python", function = "{PROGRAMS}:Digits", solved_at = 0.5}}]',
        f"run.steps={STEPS}",
        "sampling.max_tokens=12", "evaluation.every_steps=2", "evaluation.samples=2", "evaluation.prompts=3",
        f'evaluation.sources=[{{{source}, name = "held_out"}}]', *overrides,
    )  # fmt: skip


def evaluated(folder: Path, name: str) -> dict[float, dict[str, float]]:
    """Return results of a run's evaluation rounds, by version."""
    lines = (folder / name / "evaluations.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["eval/version"]: {k: v for k, v in record.items() if k.startswith("eval/held_out/")} for record in records}


def test_killing_environments_and_generators_changes_nothing(folder: Path) -> None:
    finish(start(write(folder, "turns")))
    check_whole(folder, "turns", STEPS)
    calm = evaluated(folder, "turns")
    assert {0, STEPS} <= calm.keys() <= {0, 2, 4, STEPS}, "a round overtaken by a newer version is skipped"
    hold = Hold(folder, "killed-turns")
    process = start(write(folder, "killed-turns", hold.option))
    hold.reach(1, process)
    kill(folder, "killed-turns", "environment-0", process)
    kill(folder, "killed-turns", "generator-0", process)
    hold.release()
    finish(process)
    check_whole(folder, "killed-turns", STEPS)
    assert weights(folder, "turns") == weights(folder, "killed-turns")
    found = evaluated(folder, "killed-turns")
    both = found.keys() & calm.keys()
    assert STEPS in both
    assert [found[version] for version in both] == [calm[version] for version in both], "the results of a version must not change"
