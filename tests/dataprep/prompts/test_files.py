"""The files of a prompt source, on this machine or in a dataset on a hub."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.chat.errors import DataError
from services.config.data import FileSource
from services.dataprep.prompts.files import find_files
from services.dataprep.prompts.rows import Needs, read_rows
from tests.support.preloading.starter import PLAIN
from tests.support.servers.hub import Hub

NAME = "owner/sums"
READ = """
import json, sys
from services.config.data import FileSource
from services.chat.errors import DataError
from services.dataprep.prompts.rows import read_rows
for path in sys.argv[1:]:
    try:
        rows = read_rows(FileSource(kind="jsonl" if path.endswith(".jsonl") else "parquet", path=path))
        print(json.dumps([[row.prompt, row.where] for row in rows]))
    except DataError as error:
        print(json.dumps(str(error)))
"""


def jsonl(*prompts: str) -> bytes:
    return b"".join(json.dumps({"prompt": prompt, "answer": "1"}).encode() + b"\n" for prompt in prompts)


def parquet(*prompts: str) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"prompt": list(prompts), "answer": ["1"] * len(prompts)}), out)
    return out.getvalue()


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {
        "README.md": b"# sums\n",
        "main/train-00001-of-00002.parquet": parquet("third"),
        "main/train-00000-of-00002.parquet": parquet("first", "second"),
        "main/old/train-00000-of-00001.parquet": parquet("never"),
        "test.jsonl": jsonl("one", "two"),
    }
    hub = Hub(NAME, files, dataset=True)
    yield hub
    hub.close()


def read(url: str, home: Path, *paths: str, **variables: str) -> list[Any]:
    """Return the prompts and locations of each path's rows, or its error, from a process with its own environment."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {"HF_ENDPOINT": url, "HF_HOME": str(home), PLAIN: "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", READ, *paths], env=environ, capture_output=True, text=True, timeout=100, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_dataset_on_the_hub_is_read_like_files(hub: Hub, tmp_path: Path) -> None:
    pattern, exact, pinned = (
        f"hf://datasets/{NAME}{rest}" for rest in ("/main/train-*.parquet", "/test.jsonl", f"@{hub.commit}/test.jsonl")
    )
    expected = [
        [
            ["first", f"hf://datasets/{NAME}/main/train-00000-of-00002.parquet, row 0"],
            ["second", f"hf://datasets/{NAME}/main/train-00000-of-00002.parquet, row 1"],
            ["third", f"hf://datasets/{NAME}/main/train-00001-of-00002.parquet, row 0"],
        ],
        [["one", f"hf://datasets/{NAME}/test.jsonl:1"], ["two", f"hf://datasets/{NAME}/test.jsonl:2"]],
    ]
    assert read(hub.url, tmp_path, pattern, exact, pinned) == [*expected, expected[1]]
    fetched = [request for request in hub.asked if request.startswith("GET /datasets/")]
    assert len(fetched) == 3, "each file is downloaded once"
    assert not any("README" in request or "old" in request for request in fetched)
    hub.close()
    again, listed = read(hub.url, tmp_path, exact, pattern)
    assert again == expected[1], "a cached file needs no hub"
    assert listed.startswith(f"path of source \"main\" = '{pattern}' cannot be downloaded: ")
    offline = read(hub.url, tmp_path, exact, f"hf://datasets/{NAME}/other.jsonl", pattern, HF_HUB_OFFLINE="1")
    assert offline[0] == expected[1]
    assert all("is not in the cache: check HF_ENDPOINT, HF_HUB_OFFLINE and the network" in error for error in offline[1:])


def test_what_the_hub_lacks_is_named(hub: Hub, tmp_path: Path) -> None:
    expected = {
        f"hf://datasets/{NAME}/nowhere.jsonl": f"names a file that {NAME} does not have: correct the path",
        f"hf://datasets/{NAME}/train-*.parquet": "matches none of the dataset's files, which are README.md, main/",
        f"hf://datasets/{NAME}@v2/test.jsonl": f"names a revision 'v2' that {NAME} does not have: set a branch, tag or commit",
        "hf://datasets/owner/other/test.jsonl": "owner/other is not on the hub, or is private or gated: correct the name",
        f"hf://{NAME}/test.jsonl": "does not have the form hf://datasets/OWNER/NAME/FILE",
    }
    for (path, reason), error in zip(expected.items(), read(hub.url, tmp_path, *expected), strict=True):
        assert error.startswith(f'path of source "main" = {path!r} ')
        assert reason in error


def test_a_pattern_names_files_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(f"{name}1", f"{name}2"))
    (tmp_path / "d.jsonl").mkdir()
    source = FileSource(kind="jsonl", path=str(tmp_path / "*.jsonl"))
    rows = [(row.prompt, row.where) for row in read_rows(source, Needs())]
    assert [prompt for prompt, _ in rows] == ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert rows[3][1] == f"{tmp_path}/b.jsonl:2"


def test_an_existing_file_takes_precedence_over_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_bytes(jsonl("this"))
    (tmp_path / "a1.jsonl").write_bytes(jsonl("not this"))
    assert [each.path.name for each in find_files(str(tmp_path / "a[1].jsonl"))] == ["a[1].jsonl"]


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"matches no file \(resolved to /.*\): correct the pattern"):
        find_files(str(tmp_path / "*.parquet"))
