"""A whole run whose trainer trains on groups before their step is complete, while its pods are killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.whole_runs import Hold, check_whole, finish, kill, start, summary, write_run

STEPS = 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_run_with_early_parts_survives_the_loss_of_any_pod(folder: Path) -> None:
    overrides = ("trainer.deterministic=false", "generator.engine_options.token_s=0.15", f"run.steps={STEPS}")
    hold = Hold(folder, "early")
    process = start(write_run(folder, "early", hold.option, *overrides))
    for step, pod in ((1, "trainer-0"), (2, "dataprep-0"), (4, "trainer-0"), (5, "generator-0")):
        hold.reach(step, process)
        kill(folder, "early", pod, process)
    hold.release()
    finish(process)
    check_whole(folder, "early", STEPS)
    assert summary(folder, "early")["restarts"]["trainer"] == 2  # type: ignore[index]
    records = [json.loads(line) for line in (folder / "early" / "metrics.jsonl").read_text().splitlines()]
    early = [record["rows/train/early_ratio"] for record in records]
    assert len(early) == STEPS
    assert 0 < max(early[6:]) < 1, "also after everything was killed once"
    for record in records:
        assert record["time/train_s"] >= record["time/train/total_s"], "both count early parts"
