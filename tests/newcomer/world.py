"""A folder with a newcomer's own model, data, reward and configuration, and the mistakes that can be made in it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.harness import save_tokenizer_folder

CONFIGURATION = """\
[run]
name = "mine"
steps = 3

[model]
path = "model"
dtype = "float32"

[data]
user_template = "{prompt}"

[[data.sources]]
kind = "jsonl"
path = "rows.jsonl"
prompt_field = "prompt"

[[verifiers]]
kind = "python"
function = "reward.py:score"
range = [0, 1]

[sampling]
group_size = 4
"""
REWARD = """\
def score(completion: str, answer: str) -> float:
    return float(completion == answer)
"""
ROWS = 8
CONTEXT, VOCABULARY, WIDTH = 64, 320, 8

Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Mistake:
    """A wrong input, and what its message must name."""

    name: str
    key: str
    """Empty if it does not concern a key."""
    value: str
    remedy: str
    edits: Sequence[Edit] = ()
    arguments: Sequence[str] = ()
    environ: dict[str, str] = field(default_factory=dict[str, str])
    place: str = "my.toml"
    """Where the key is set: `my.toml` (any line that sets it), `command line`, a variable's name, or empty for nowhere."""
    calls: bool = False
    """Whether finding it requires calling a verifier."""


def make(folder: Path, model: Path) -> None:
    """Write the folder; `model` is a folder written by `make_model`."""
    shutil.copytree(model, folder / "model")
    (folder / "my.toml").write_text(CONFIGURATION)
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(ROWS)))


def make_model(folder: Path) -> None:
    """Write a tokenizer, a configuration, and weights that are never computed with."""
    save_tokenizer_folder(folder)
    described = {
        "model_type": "qwen3", "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))
    write_weights(folder / "model.safetensors", {"embed.weight": [VOCABULARY, WIDTH], "head.weight": [VOCABULARY, WIDTH]})


def write_weights(file: Path, shapes: dict[str, list[int]], sparse: bool = False) -> None:
    """Write a safetensors file of float32 zeros; a `sparse` one takes no disk space."""
    header, end = dict[str, object](), 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end) if sparse else out.write(bytes(end))


def sub(old: str, new: str, file: str = "my.toml") -> Edit:
    """Return the edit that replaces text that occurs once in a file."""

    def edit(folder: Path) -> None:
        text = (folder / file).read_text()
        assert text.count(old) == 1, (old, text)
        (folder / file).write_text(text.replace(old, new))

    return edit


def put(file: str, content: str | bytes) -> Edit:
    """Return the edit that writes a file."""

    def edit(folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)

    return edit


def add(text: str, file: str = "my.toml") -> Edit:
    """Return the edit that appends to a file."""
    return lambda folder: put(file, (folder / file).read_text() + text)(folder)


def drop(file: str) -> Edit:
    """Return the edit that deletes a file."""
    return lambda folder: (folder / file).unlink()


def row(number: int, text: str | bytes) -> Edit:
    """Return the edit that replaces a line of the data, counted from 1."""

    def edit(folder: Path) -> None:
        lines = (folder / "rows.jsonl").read_bytes().splitlines()
        lines[number - 1] = text.encode() if isinstance(text, str) else text
        (folder / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")

    return edit


def unnamed(mistake: Mistake, folder: Path, output: str) -> list[str]:
    """Return which of key, place, value and remedy the best line of the output lacks; [] if one line names them all."""
    least: list[str] | None = None
    for line in output.splitlines():
        missing = [
            what
            for what, there in (
                ("key", mistake.key in line),
                ("place", _at(mistake, folder, line)),
                ("value", mistake.value in line),
                ("remedy", mistake.remedy in line),
            )
            if not there
        ]
        least = missing if least is None or len(missing) < len(least) else least
    return ["key", "place", "value", "remedy"] if least is None else least


def _at(mistake: Mistake, folder: Path, line: str) -> bool:
    """Return whether a line names the place: in a file, a line that sets the key or opens its section."""
    if mistake.place != "my.toml":
        return mistake.place in line
    if not (found := re.search(r"\bmy\.toml:(\d+): ", line)):
        return False
    there = (folder / "my.toml").read_text().splitlines()[int(found[1]) - 1]
    return any(part in there for part in mistake.key.split(".") if not part.isdigit())
