"""Decoding tokens with a tokenizer that exists, appears later or is downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.operations.inspection import text
from services.operations.inspection.text import TextReader
from tests.support.harness import save_tokenizer_folder
from tests.support.preloading.starter import PLAIN
from tests.support.servers.hub import Hub

READ = """
import sys
from services.operations.inspection.text import TextReader
reader = TextReader("owner/name", download=sys.argv[1] == "download")
print(reader.text([5, 6]), reader.why_not, sep="|")
"""


def read(hub: Hub, home: Path, how: str) -> list[str]:
    """Return text and reason from a new process, because the library reads the location of its cache on import."""
    environ = {**os.environ, PLAIN: "1", "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", READ, how], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.strip().split("|")


def test_only_permitted_readers_download_the_tokenizer(tmp_path: Path) -> None:
    save_tokenizer_folder(tmp_path)
    expected = TextReader(str(tmp_path)).text([5, 6])
    assert expected
    hub = Hub("owner/name", {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes(), "model.safetensors": b"weights"})
    try:
        assert "has no tokenizer.json on this machine" in read(hub, tmp_path / "home", "look")[1]
        assert hub.asked == []
        hub.status = 503
        assert "cannot be downloaded" in read(hub, tmp_path / "home", "download")[1]
        hub.status = 200
        assert read(hub, tmp_path / "home", "download") == [expected, ""]
        assert not any("model.safetensors" in asked for asked in hub.asked)
        hub.asked.clear()
        assert read(hub, tmp_path / "home", "look") == [expected, ""]
        assert hub.asked == []
    finally:
        hub.close()


def test_a_tokenizer_that_appears_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "LOOK_AGAIN_S", 0.0)
    reader = TextReader(str(tmp_path / "model"))
    assert reader.text([5]) is None
    assert reader.why_not
    (tmp_path / "model").mkdir()
    save_tokenizer_folder(tmp_path / "model")
    assert reader.text([5])
    assert not reader.why_not


def test_ids_outside_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    save_tokenizer_folder(tmp_path)
    reader = TextReader(str(tmp_path))
    assert reader.text([]) == ""
    assert reader.text([5, -1]) is reader.text([5, 10**6]) is None
