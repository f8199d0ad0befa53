"""Decoding tokens with a tokenizer that exists, appears later or is downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.operations.inspection import text
from services.operations.inspection.byte_level import _BYTES, ByteLevelDecoder
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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer with all bytes, some merged words and special tokens, one of which is outside the byte alphabet."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer_folder(folder)
    found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.add_special_tokens(["<｜end｜>", "<pad here>", "Ġé"])
    assert isinstance(found.decoder, decoders.ByteLevel)
    return found


@hypothesis.given(data=st.data())
def test_bytes_are_decoded_as_by_the_tokenizer(tokenizer: Tokenizer, data: st.DataObject) -> None:
    fast = ByteLevelDecoder.of(tokenizer)
    assert fast is not None
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60))
    assert fast.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_invalid_utf_8_is_decoded_as_by_the_tokenizer(tokenizer: Tokenizer) -> None:
    fast = ByteLevelDecoder.of(tokenizer)
    assert fast is not None
    alphabet = {byte: tokenizer.token_to_id(char) for char, byte in _BYTES.items()}
    assert None not in alphabet.values()
    for raw in ("é €𝄞".encode(), b"\xff\xe2\x82a", b"\xf0\x9d\x84", b"\xed\xa0\x80", b"\xc0\x80\xf5\x80", bytes(range(256))):
        ids = [alphabet[byte] for byte in raw]
        assert fast.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_ids_outside_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    save_tokenizer_folder(tmp_path)
    reader = TextReader(str(tmp_path))
    assert reader.text([]) == ""
    assert reader.text([5, -1]) is reader.text([5, 10**6]) is None
    assert ByteLevelDecoder.of(Tokenizer(models.WordPiece())) is None


def test_parts_are_decoded_as_if_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The parts include some that end within a character, and some without text."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reader, alphabet = TextReader(str(tmp_path)), {byte: char for char, byte in _BYTES.items()}
    ids: list[int] = [tokenizer.token_to_id(alphabet[byte]) or 0 for byte in "é€𝄞 and more".encode()]
    ends = [0, 1, 1, 4, 8, 17]
    assert reader.texts(ids, ends) == [reader.text(ids[start:end]) for start, end in pairwise(ends)]
    assert reader.texts([*ids, -1], [0, 2, len(ids) + 1]) == ["é", None]
    assert TextReader(None).texts(ids, ends) == [None] * 5
