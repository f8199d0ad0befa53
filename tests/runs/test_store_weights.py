"""A run that syncs weights through a version store ends in the same weights as over gloo, despite kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.weights.versions import catalogue
from tests.support.whole_runs import STEPS, Hold, check_whole, finish, kill, start, weights, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_store_survives_kills_and_gives_the_same_weights(folder: Path, undisturbed: str) -> None:
    hold = Hold(folder, "stored")
    process = start(write_run(folder, "stored", hold.option, "sync.backend=store"))
    for done, victim in ((2, "generator-0"), (4, "trainer-0")):
        hold.reach(done, process)
        kill(folder, "stored", victim, process)
    hold.release()
    finish(process)
    check_whole(folder, "stored")
    assert weights(folder, "stored") == undisturbed
    [trainer] = (folder / "stored" / "weights").iterdir()
    held = catalogue.decode((trainer / catalogue.CATALOGUE).read_bytes(), int(trainer.name))
    assert held.newest == STEPS
    assert held.existing([f"{trainer.name}/{path.relative_to(trainer)}" for path in trainer.rglob("*")]) == held
    assert not list(trainer.rglob("*.partial"))
