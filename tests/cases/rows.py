"""Cases of `rows.jsonl`: the content of a data file, and settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from services.chat.tokenizers import load_tokenizer
from services.config import ConfigError
from services.config.data import Data, FileSource
from services.config.load import validate
from services.dataprep.prompts.catalogue import PromptSource
from services.dataprep.prompts.rows import Needs, PromptRow, read_rows
from services.dataprep.prompts.tokenizer import PromptTokenizer
from services.verifiers.loaded import builtin
from tests.environment.support.templates import FAMILIES, save_family
from tests.support.verifiers import verifier

OF_SOURCE = ("prompt_field", "answer_field", "answer_pattern", "columns")
COUNTS = {"one row": 1, "two rows": 2}


def attempt(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    """Return the rows that a source yields and their prompts as text, or why it is refused."""
    right: str = case["right"]
    try:
        rows, texts = _read(case, folder, scratch)
    except ConfigError as error:
        return f"refused: {error}", "refused" in right
    if "noted" in right and (remarks := _remarks(case, scratch)):
        return remarks, True
    found = [(row.prompt, row.answer, row.columns) for row in rows]
    return found, not right.startswith("refused") and all(_holds(right, case, rows, texts))


def _read(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[list[PromptRow], list[str]]:
    settings = dict(case["settings"])
    file = scratch / f"prompts.{case['format']}"
    if case["format"] == "jsonl":
        file.write_bytes(case["content"].encode())
    else:
        _write_parquet(file, case["content"])
    given = {name: settings.pop(name) for name in OF_SOURCE if name in settings}
    source = FileSource(kind=case["format"], path=str(file), **given)
    verifiers = [verifier("python", function="m:f") if settings.get("verifier") == "python" else verifier("exact")]
    settings.pop("verifier", None)
    if "chat_template" in settings:
        settings["chat_template"] = (folder / settings["chat_template"]).read_text()
    data = Data.model_validate({"sources": [source.model_dump()], **settings})
    tokenizer = PromptTokenizer(save_family(FAMILIES[0], scratch), data)
    rows = list(read_rows(source, Needs.of(verifiers, source)))
    decoder = load_tokenizer(scratch)
    return rows, [decoder.decode(ids, skip_special_tokens=False) for ids in tokenizer.encode(rows)]


def _remarks(case: dict[str, Any], scratch: Path) -> list[str]:
    """Return what is noted about a source before a run."""
    source = {"kind": case["format"], "path": str(scratch / f"prompts.{case['format']}")}
    tree = {
        "model": {"path": str(scratch), "max_tokens": 256},
        "data": {"sources": [source], "max_prompt_tokens": 128, **case["settings"]},
        "sampling": {"max_tokens": 64},
        "verifiers": [{"kind": "exact"}],
    }
    return [remark.what for remark in PromptSource(validate(tree, origin="test")).remarks]


def _holds(right: str, case: dict[str, Any], rows: Sequence[PromptRow], texts: Sequence[str]) -> list[bool]:
    """Return whether each thing that `right` says holds."""
    said = [len(rows) == count for words, count in COUNTS.items() if right.startswith(words)]
    if match := re.search(r"answer (\S+)$", right):
        said.append(rows[0].answer == match[1])
    if match := re.search(r"content (\S+)$", right):
        said.append(match[1] in texts[0])
    for reply, score in re.findall(r"(?:the reply |, )(\S+) scores (\d)", right):
        made = builtin(verifier(case["settings"]["verifier"]), FileSource(kind="jsonl", path="/unused"))
        said.append(made.score(reply, rows[0].answer) == float(score))
    if right == "exact digits":
        said.append(rows[0].answer in case["content"] and rows[0].answer.isdigit())
    if right.startswith("both are applied"):
        said += [case["settings"]["system_prompt"] in texts[0], "Q: 2+2?" in texts[0]]
    if "character kept" in right:
        said.append("\ufeff" in str(rows[0].prompt))
    if "continues the message" in right:
        said.append(texts[0].endswith("Let me add:"))
    if "y is null" in right:
        said.append(rows[0].columns is not None and rows[0].columns["meta"]["y"] is None)
    return said or [False]


def _write_parquet(file: Path, columns: dict[str, list[Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.table({name: [_value(each) for each in column] for name, column in columns.items()}), file
    )


def _value(given: Any) -> Any:
    """Return a value that JSON cannot hold: `NaN (float)`, `2.50 (decimal)`."""
    match = re.fullmatch(r"(\S+) \((float|decimal)\)", given) if isinstance(given, str) else None
    return given if match is None else {"float": float, "decimal": Decimal}[match[2]](match[1])
