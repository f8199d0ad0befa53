"""A short run of tests/faults: eight faults on one real run, and a check that it detects a missing guard."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from services.config import load
from services.store.functions.footprint import footprints
from tests.faults.kinds import AT_THE_END, AT_THE_START, CALLS, ELSEWHERE, KINDS, Shape, chosen, sequence
from tests.faults.mutants import MUTANTS, ROOT, copy_code
from tests.faults.run_under_test import PROFILES, Setting

QUICK = (  # tests/runs/test_run.py kills the pods that are slow to start
    "kill-dataprep,kill-redis,stop-generator,stop-trainer,cut-generator,lose-dataprep,lose-trainer,drop-trainer"
)


def drive(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults", "--folder", str(folder), "--json", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


def test_faults_follow_the_seed_with_equal_shares_of_kinds() -> None:
    shape = Shape(generators=3, ranks=1)
    faults = list(sequence(7, 3 * len(KINDS), KINDS, shape))
    assert faults == list(sequence(7, 3 * len(KINDS), KINDS, shape))
    assert faults[:20] == list(sequence(7, 20, KINDS, shape))
    assert faults != list(sequence(8, 3 * len(KINDS), KINDS, shape))
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(KINDS, 3)


def test_kinds_are_chosen_by_name_or_by_action() -> None:
    shape = Shape(generators=2, ranks=2)
    assert "twin-trainer" not in chosen("", shape), "a second trainer would be one process, but this run has two ranks"
    assert chosen("pause,kill-redis", shape) == ("kill-redis", "pause-redis")
    with pytest.raises(ValueError, match=r"'burn' is no kind of fault here; there are: kill-generator"):
        chosen("kill,burn", shape)


def test_only_rewards_that_can_be_broken_are() -> None:
    assert set(chosen("", Shape(2, 1, breakable=True))) - set(chosen("", Shape(2, 1))) == {"break-reward"}
    with pytest.raises(ValueError, match="'break' is no kind of fault here"):
        chosen("break", Shape(2, 1))


def test_every_functions_reply_is_lost_in_some_test() -> None:
    called = {call for calls in CALLS.values() for call in calls}
    assert called | ELSEWHERE.keys() == footprints().keys()
    assert not called & ELSEWHERE.keys()
    assert {*AT_THE_START, *AT_THE_END} <= called


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_has_a_valid_configuration(profile: str, tmp_path: Path) -> None:
    config = load(Setting(tmp_path, ROOT, profile).write(profile), environ={})
    assert config.run.name == profile
    assert bool(config.environments) == (profile == "turns")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_still_applies(mutant: str, tmp_path: Path) -> None:
    copy_code(tmp_path, mutant)
    path = MUTANTS[mutant][0]
    assert (tmp_path / path).read_text() != (ROOT / path).read_text()


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_run_with_eight_faults_is_bit_identical(tmp_path: Path) -> None:
    run = ("--generators", "2", "--steps", "28", "--token-s", "0.1")
    done = drive(tmp_path / "faults", "--faults", "8", "--seed", "8801", "--kinds", QUICK, "--in-place", *run)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["faults"] + found["missed"] == 8
    assert found["missed"] <= 2, done.stderr
    assert [found[name] for name in ("lost", "doubled", "skipped", "leaked", "dropped", "went_back")] == [0] * 6
    assert found["max_lag"] <= 1
    assert found["bit_identical"]
    assert found["in_order"]


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_non_idempotent_commit_is_detected(tmp_path: Path) -> None:
    """The first fault of this seed loses the reply to a commit, which the trainer's client then sends again."""
    done = drive(
        tmp_path / "faults", "--faults", "1", "--seed", "3", "--kinds", "lose-trainer", "--mutant", "commit", "--generators", "1"
    )
    assert done.returncode == 1, done.stderr
    assert "trained twice" in done.stderr
    assert "seed 3" in done.stderr
