"""Searching a log: results are paged, sorted and complete, without the steps that a restore has undone."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from services.operations.samples.columns import MEANINGS
from services.operations.samples.folder import LogPosition, Part, SampleFolder, current, name_of
from services.operations.samples.search import ExpressionError, Search
from services.tracker.writer import MERGED, PartWriter
from tests.operations.samples.made import columns_of, made_row, write_log

ROOT = Path(__file__).parent.parent.parent.parent


def numbers(log: Search, **asked: object) -> list[int]:
    return [int(row["logged_s"] - 1e9) for row in log.find(**asked).rows]  # pyright: ignore


def test_pages_are_sorted_and_complete(tmp_path: Path) -> None:
    rows = [made_row(i) for i in range(100)]
    write_log(tmp_path, rows)
    log = Search.of(tmp_path)
    pages = [number for at in range(0, 100, 30) for number in numbers(log, sort="length", offset=at, limit=30)]
    assert pages == sorted(range(100), key=lambda i: (rows[i]["length"], -i))
    assert numbers(log, sort="reward", reverse=True, limit=3) == [99, 95, 91]
    assert numbers(log, limit=3) == [99, 98, 97]
    assert log.find(limit=0).total == 100
    with pytest.raises(ExpressionError, match="cannot sort by 'prompt'"):
        log.find(sort="prompt")


def test_new_files_are_found(tmp_path: Path) -> None:
    writer = write_log(tmp_path, [made_row(i) for i in range(8)])
    log = Search.of(tmp_path)
    assert log.find().total == 8
    writer.write(columns_of([made_row(8)]), LogPosition(1, 1, {"1": 0}))
    assert numbers(log, where="sample == 0", limit=2) == [8, 4]


def test_files_without_a_newer_column_have_nulls_in_it(tmp_path: Path) -> None:
    """They can be searched, filtered, sorted, shown and merged with new files."""
    writer = write_log(tmp_path, [made_row(i) for i in range(8)])
    [old] = writer.folder.parts
    pq.write_table(pq.read_table(old.path).drop_columns(["gap_mean", "gap_max", "gaps"]), old.path)
    writer.write(columns_of([made_row(8, gap_max=0.5, gap_mean=0.25, gaps=[0.5, 0.0])]), LogPosition(1, 1, {"1": 0}))
    assert numbers(Search.of(tmp_path), where="gap_max > 0.1") == [8]
    for batch in range(MERGED):
        found = Search.of(tmp_path).find(sort="gap_max", reverse=True, limit=9).rows
        assert [row["gaps"] for row in found] == [[0.5, 0.0], *[None] * 8]
        writer.write(columns_of([made_row(9 + batch)]), LogPosition(1, 1, {"1": 0}))
        writer.tidy()
    assert len(writer.folder.parts) < MERGED


def test_an_empty_folder_has_no_rows(tmp_path: Path) -> None:
    found = Search.of(tmp_path / "none").find("reward > 0")
    assert (found.total, found.rows, found.of) == (0, [], 0)


def test_a_search_that_takes_too_long_ends(tmp_path: Path) -> None:
    write_log(tmp_path, [made_row(i, completion="ab" * 2**18) for i in range(4)])
    slow = " and ".join(f"not regexp_matches(completion, '(a|b){{30}}c{i}')" for i in range(30))
    with pytest.raises(ExpressionError, match=r"the search took longer than 0.01 s: narrow it"):
        Search.of(tmp_path).find(slow, limit_s=0.01)


def test_undone_steps_are_excluded_unless_requested(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, 1000)
    writer.write(columns_of([made_row(i) for i in range(32)]), LogPosition(1, 3, {"1": 0}))  # steps 0 to 3
    again = [made_row(i, incarnation=9, completion="again") for i in range(16, 24)]
    writer.write(columns_of(again), LogPosition(9, 2, {"1": 0, "9": 2}))  # restored to step 1
    log = Search.of(tmp_path)
    assert [row["completion"] for row in log.find("step >= 2", limit=99).rows] == ["again"] * 8
    assert log.find().total == 16 + 8
    assert log.find("undone").total == 16
    assert log.find("undone or not undone").total == 40


def test_merged_files_and_their_sources_count_once(tmp_path: Path) -> None:
    batches = MERGED * MERGED + 5
    writer = write_log(tmp_path, [made_row(i) for i in range(batches)], batch=1)
    names = sorted(path.name for path in tmp_path.glob("*.parquet"))
    assert len(names) == 1 + 5
    assert names[0] == name_of(1, MERGED * MERGED)
    assert numbers(Search.of(tmp_path), limit=batches) == list(reversed(range(batches)))
    (tmp_path / name_of(3, 3)).write_bytes((tmp_path / name_of(batches, batches)).read_bytes())  # killed before it was deleted
    (tmp_path / f".{name_of(7, 9)}").write_bytes(b"half")
    assert Search.of(tmp_path).find().total == batches
    assert writer.folder.position == PartWriter(tmp_path, 1000).folder.position
    assert not list(tmp_path.glob(".part*"))
    assert [first for _, first, _ in current(tmp_path)] == [1, *range(batches - 4, batches + 1)]


def test_the_oldest_rows_are_deleted_beyond_the_limit(tmp_path: Path) -> None:
    write_log(tmp_path, [made_row(i) for i in range(400)], batch=4, keep=64)
    found = Search.of(tmp_path).find(limit=1000)
    assert 64 <= found.total < 64 + 8
    assert found.rows[0]["logged_s"] - 1e9 == 399


def test_a_damaged_file_is_named_and_the_others_read(tmp_path: Path) -> None:
    write_log(tmp_path, [made_row(i) for i in range(24)])
    path = tmp_path / name_of(2, 2)
    path.write_bytes(path.read_bytes()[:100])
    folder = SampleFolder(tmp_path)
    folder.refresh()
    assert list(folder.damaged) == [path.name]
    assert Search.of(tmp_path).find().total == 16
    writer = PartWriter(tmp_path, 1000)
    writer.write(columns_of([made_row(24)]), LogPosition(1, 3, {}))
    assert Search.of(tmp_path).find().total == 17


def test_the_documented_line_reads_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path / "runs" / "my_run" / "samples", [made_row(i) for i in range(40)])
    [line] = re.findall(r"^(pyarrow\.dataset.*)$", (ROOT / "docs" / "samples.md").read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert eval(line, {"pyarrow": pyarrow}).num_rows == 10


def test_every_column_is_documented() -> None:
    text = (ROOT / "docs" / "samples.md").read_text()
    assert [f"| `{name}` | {meaning} |" for name, meaning in MEANINGS.items() if f"| `{name}` | {meaning} |" not in text] == []


def test_files_that_are_merged_during_a_search_are_read_again(tmp_path: Path) -> None:
    """The tracker of a running run merges and deletes files at any time."""
    writer = PartWriter(tmp_path, 1000)
    for number in range(MERGED):
        writer.write(columns_of([made_row(number)]), LogPosition(1, 1, {"1": 0}))

    class Merging(SampleFolder):
        def refresh(self) -> list[Part]:
            parts = super().refresh()
            writer.tidy()  # after the parts are listed, and before they are read
            return parts

    assert numbers(Search(Merging(tmp_path)), where="'it' in completion", limit=99) == list(reversed(range(MERGED)))
    assert len(writer.folder.parts) == 1


def test_a_file_whose_contents_are_damaged_is_left_out(tmp_path: Path) -> None:
    write_log(tmp_path, [made_row(i) for i in range(24)])
    path = tmp_path / name_of(2, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])  # its footer can be read
    log = Search.of(tmp_path)
    assert log.find("'it' in completion").total == 16
    assert list(log.folder.damaged) == [path.name]


def test_a_file_that_is_gone_for_good_is_an_error(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)

    def gone(_: object) -> None:
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        folder.reading(gone)
