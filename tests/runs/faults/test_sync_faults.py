"""A short run of tests/sync_faults: each kind of fault once, in rounds whose members are real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from math import lcm
from pathlib import Path

import pytest

from tests.faults.mutants import ROOT
from tests.sync_faults.faults import KINDS, PHASES, chosen, possible, sequence
from tests.sync_faults.network import permitted

ONCE = ("kill", "stop-short", "stop-long", "cut-trainer-long", "cut-redis-short", "cut-all-long")


def test_every_kind_is_combined_with_every_phase() -> None:
    for kinds in (KINDS, possible(False), ONCE):
        whole = len(kinds) * len(PHASES)
        faults = list(sequence(7, whole, kinds, ["a", "b"]))
        assert faults[:4] == list(sequence(7, 4, kinds, ["a", "b"]))
        assert len({(fault.kind, fault.phase) for fault in faults}) == whole
        first = lcm(len(kinds), len(PHASES))
        assert set(Counter(fault.kind for fault in faults[:first]).values()) == {first // len(kinds)}


def test_kinds_are_chosen_by_name_or_by_action() -> None:
    assert chosen("kill,stop", networks=False) == ("kill", "stop-short", "stop-long")
    assert not any(kind.startswith(("cut-trainer", "cut-all")) for kind in possible(networks=False))
    with pytest.raises(ValueError, match=r"'cut-trainer' is no kind of fault here; there are: kill"):
        chosen("cut-trainer", networks=False)


@pytest.mark.timeout(600)
def test_a_fault_of_one_member_does_not_affect_the_others(tmp_path: Path) -> None:
    kinds = [kind for kind in ONCE if kind in possible(permitted())]
    command = [sys.executable, "-m", "tests.sync_faults", "--rounds", str(len(kinds)), "--kinds", ",".join(kinds), "--seed", "5"]
    command += ["--members", "3", "--deadline-s", "4", "--folder", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert (found["faults"], found["not_struck"], found["violations"]) == (len(kinds), 0, [])
    assert found["compared"] >= 3 * found["rounds"], "members reported their weights after every round"
