"""The number of processors is that of the container, not of its node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.runtime.processes import processors


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("6400000 100000", 8), (None, 8)],
)
def test_a_containers_limit_counts(limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    if limit:
        quota.write_text(limit + "\n")
    monkeypatch.setattr(processors, "QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert processors.processors() == expected
