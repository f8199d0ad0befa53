"""`grpo samples` prints matching rows safely and reports what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.config import to_toml
from services.console.commands.__main__ import main
from services.operations.samples.folder import LogStatus
from tests.operations.samples.made import made_row, write_log
from tests.support.harness import small_config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.toml").write_text(to_toml(small_config(tmp_path)))
    return tmp_path / "small"


def test_samples_are_printed_as_table_text_and_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [made_row(i) for i in range(40)] + [made_row(40, completion="\x1b[2Jgone")]
    writer = write_log(run / "samples", rows)
    assert main(["samples", str(run), "--where", "reward > 0.7", "--sort", "length", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "step",
        "group",
        "sample",
        "outcome",
        "reward",
        "advantage",
        "length",
        "versions",
        "source",
        "completion",
    ]
    assert lines[-1] == "0 to 1 of 10 completions match; 41 are logged"
    assert main(["samples", str(run), "--full", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "\\e[2Jgone" in out
    assert "\x1b" not in out
    writer.note(LogStatus({"stale": 3}, 7))
    assert main(["samples", str(run), "--json", "--where", "sample == 1 and step == 4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["total"], found["missed_groups"], found["first_step"]) == (2, {"stale": 3}, 7)
    assert found["rows"][0]["scores"] == {"exact": 0.25}
    assert "tokens" not in found["rows"][0]
    assert main(["samples", str(run)]) == 0
    out = capsys.readouterr().out
    assert "3 groups are missing, because the tracker was behind or gone: 3 stale" in out
    assert "the log begins at step 7" in out


def test_invalid_queries_are_one_line_errors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run)]) == 2
    assert "samples.keep is 0" in capsys.readouterr().err
    write_log(run / "samples", [made_row(0)])
    assert main(["samples", str(run), "--where", "rewrad < 1"]) == 2
    error = capsys.readouterr().err
    assert "no column 'rewrad'; the columns are group" in error
    assert error.count("\n") == 1
    assert main(["samples", str(run), "--sort", "prompt"]) == 2
