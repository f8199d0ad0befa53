"""A short storm of kills of environments (tests/storm): nothing is lost, duplicated, run or sampled twice, or left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storm.kills import storm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_storm_of_kills_does_no_harm(tmp_path: Path) -> None:
    found = await storm(tmp_path / "storm", kills=20, seed=2, of_each={"environment": 5, "generator": 5})
    assert found.kills.total() >= 20
    assert found.turns > 50
    assert (found.harm, found.faults) == (dict.fromkeys(found.harm, 0), [])
