"""Kills in the store of versions: nothing hangs, nobody holds other weights, and what was published can be fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_whoever_is_killed_nobody_holds_other_weights() -> None:
    """In a process of its own, since it forks."""
    command = [sys.executable, "-m", "tests.weights.store_storm", "--kills", "24", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tally = json.loads(done.stdout.splitlines()[-1])
    assert tally["wrong"] == []
    assert tally["writers"] + tally["readers"] >= 24
    assert tally["fetched"] == tally["writers"]
    assert tally["compared"] >= tally["readers"]
