"""Reads the rows of a prompt source: JSONL or parquet files, or a reasoning-gym task, one at a time.

Guarantees: every row that is yielded has a prompt, and an answer if one is needed; anything else raises a `DataError` that names
file and line.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

import msgspec

from services.chat.errors import DataError
from services.chat.messages import BadMessages, normalised
from services.config.data import FileSource, ReasoningGymSource, Source
from services.config.verifiers import VerifierConfig, needs_answer, needs_row
from services.dataprep.prompts.files import SourceFile, find_files
from services.protocol.entries import encode_entry
from services.runtime.reasoning_tasks import import_factory

if TYPE_CHECKING:
    import pyarrow

ABSENT = object()
"""Stands for the value of a field that a row does not have."""
PARQUET_BATCH = 1024  # rows held at a time

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """A prompt as its source states it."""

    prompt: str | Messages
    answer: str
    where: str
    """Its place for messages, e.g. `prompts.jsonl:17`."""
    columns: dict[str, Any] | None = None
    """Its fields, where verifiers are given them."""


@dataclass(frozen=True)
class Needs:
    """What verifiers need from the rows of a source."""

    answer: bool = True
    """Whether a row without an answer is a fault."""
    columns: bool = False
    """Whether rows keep their other fields."""

    @classmethod
    def of(cls, verifiers: Sequence[VerifierConfig], source: Source) -> Needs:
        """Return what the verifiers of a source need, and its environment, which is given the row."""
        return cls(needs_answer(verifiers, source.name), needs_row(verifiers, source.name) or bool(source.environment))


def read_rows(source: Source, needs: Needs = Needs()) -> Iterator[PromptRow]:
    """Return all rows of the source, in its order."""
    if isinstance(source, ReasoningGymSource):
        return _reasoning_gym(source, needs)
    return _file_rows(source, needs)


def _file_rows(source: FileSource, needs: Needs) -> Iterator[PromptRow]:
    for file in files_of(source):
        try:
            for where, record in _jsonl(file) if source.kind == "jsonl" else _parquet(file, source, needs):
                yield read_record(record, source, needs, where)
        except OSError as error:  # of the file system; pyarrow's, too, for damaged contents
            reason = error.strerror or " ".join(str(error).split())
            raise DataError(
                f'path of source "{source.name}" = {file.shown!r} cannot be read ({reason}): correct the path or the file'
            ) from None


def files_of(source: FileSource) -> list[SourceFile]:
    """Return the files of a source, downloaded if they are on the hub. Raises `DataError`."""
    try:
        return find_files(source.path)
    except DataError as error:
        raise DataError(f'path of source "{source.name}" = {source.path!r} {error}') from None


def read_record(record: dict[str, Any], source: FileSource, needs: Needs, where: str) -> PromptRow:
    """Read one record of a source. `where` is its place, for messages. Raises `DataError`."""
    prompt = _prompt(_field(record, source.prompt_field, "prompt_field", where), source.prompt_field, where)
    if source.environment and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: field {source.prompt_field!r} ends with a message of the assistant, which only a rollout without an "
            "environment continues: remove it from the prompt"
        )
    columns = _columns(record, source, where) if needs.columns else None
    if not needs.answer and _missing(_looked_up(record, source.answer_field)):
        return PromptRow(prompt, "", where, columns)
    answer = _answer(_field(record, source.answer_field, "answer_field", where), source.answer_field, needs, where)
    if source.answer_pattern:
        match = re.search(source.answer_pattern, answer)
        if match is None or match[1] is None:
            raise DataError(
                f'{where}: answer_pattern of source "{source.name}" = {source.answer_pattern!r} does not match '
                f"{_short(answer)}: fix the pattern or the row"
            )
        answer = match[1].strip()
    return PromptRow(prompt, answer, where, columns)


def _jsonl(file: SourceFile) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, line in lines_of(file):
        yield where, _record(line, where)


def lines_of(file: SourceFile) -> Iterator[tuple[str, bytes]]:
    """Return the lines of a JSONL file that are not blank, with their places for messages."""
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(BOM_UTF8) if number == 1 else line
            if line.strip():
                yield f"{file.shown}:{number}", line


def read_jsonl_row(line: bytes, source: FileSource, needs: Needs, where: str) -> PromptRow:
    """Read one line of a JSONL source. `where` is its place, for messages. Raises `DataError`."""
    return read_record(_record(line, where), source, needs, where)


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason}): save the file as UTF-8") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}): fix or remove the line") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, not {type(record).__name__}: fix or remove the line")
    return cast("dict[str, Any]", record)


def _columns(record: dict[str, Any], source: FileSource, where: str) -> dict[str, Any]:
    """Return the fields of a row that verifiers are given."""
    return {name: _field(record, name, "columns", where) for name in source.columns} if source.columns else record


def _parquet(given: SourceFile, source: FileSource, needs: Needs) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(given.path) as file:
            names = file.schema_arrow.names
            read = [source.prompt_field, source.answer_field, *(source.columns or names if needs.columns else ())]
            read = [name if name in names else name.partition(".")[0] for name in read]
            wanted = [name for name in dict.fromkeys(read) if name in names]
            number = 0
            for batch in file.iter_batches(PARQUET_BATCH, columns=wanted):
                for record in _records(batch, f"{given.shown}, rows {number} to {number + batch.num_rows - 1}"):
                    yield f"{given.shown}, row {number}", record if len(wanted) > 1 else dict.fromkeys(names) | record
                    number += 1
    except pyarrow.ArrowException as error:
        raise DataError(
            f'path of source "{source.name}" = {given.shown!r} is not a parquet file that can be read ({error}): correct the '
            "path or the kind"
        ) from None


def _records(batch: pyarrow.RecordBatch, where: str) -> list[dict[str, Any]]:
    """Return the rows of a batch as Python values. `where` is its place, for messages. Raises `DataError`."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, KeyError) as error:  # not UTF-8, a field twice, a time out of range, an unknown time zone
        raise DataError(
            f"{where}: a value cannot be read ({error}): correct it, or name the fields to send in columns of the source"
        ) from None


def _field(record: dict[str, Any], name: str, key: str, where: str) -> Any:
    found = _looked_up(record, name)
    if found is ABSENT:
        raise DataError(
            f"{where}: no field {name!r} ({key} of its source); set {key} to one of its fields: "
            f"{', '.join(sorted(record)) or 'it has none'}"
        )
    return found


def _looked_up(record: dict[str, Any], name: str) -> Any:
    """Return the value of a field, or `ABSENT`; `a.b` is the field b of the object a, unless there is a field a.b."""
    if name in record:
        return record[name]
    first, point, rest = name.partition(".")
    inner = record.get(first)
    return _looked_up(cast("dict[str, Any]", inner), rest) if point and isinstance(inner, dict) else ABSENT


def _prompt(value: Any, name: str, where: str) -> str | Messages:
    if isinstance(value, str):
        return value
    try:
        messages = normalised(value)
        for place, message in enumerate(messages):
            if message["role"] in ("system", "user") and value[place].get("content") is None:
                raise BadMessages(f"messages[{place}] has no content")
        return messages
    except BadMessages as error:
        raise DataError(
            f"{where}: field {name!r} must be a string or a list of messages with `role` and `content`, not {_short(value)} "
            f"({error}): fix the row"
        ) from None


def _answer(value: Any, name: str, needs: Needs, where: str) -> str:
    """Return an answer as text: a number as its shortest decimal, and any other value as JSON if nothing compares with it."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and not _missing(value):
        return _decimal(value)
    if not needs.answer:
        return json.dumps(value, ensure_ascii=False, default=str)
    raise DataError(f"{where}: field {name!r} must be a string or a number, not {_short(value)}: fix the row")


def _missing(value: Any) -> bool:
    """Return whether a value stands for no answer: null, and NaN and infinity, with which tables fill gaps."""
    return value is None or value is ABSENT or (isinstance(value, float | Decimal) and not math.isfinite(value))


def _decimal(number: float | Decimal) -> str:
    """Return a finite number without an exponent; a float that is whole, as an integer."""
    whole = isinstance(number, float) and number.is_integer()
    return str(int(number)) if whole else format(Decimal(str(number)), "f")


def _reasoning_gym(source: ReasoningGymSource, needs: Needs) -> Iterator[PromptRow]:
    factory = import_factory()
    if source.task not in factory.DATASETS:
        near = difflib.get_close_matches(source.task, list[str](factory.DATASETS), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else "see the task list of reasoning-gym"
        raise DataError(f'task of source "{source.name}" = {source.task!r} is not a task of reasoning-gym; {hint}')
    try:
        task = factory.create_dataset(source.task, **source.arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f'options of source "{source.name}" = {source.options!r} are not valid for the task {source.task!r}: {error}'
        ) from None
    for index in range(source.arguments["size"]):
        where = f"{source.task}, row {index}"
        entry = task[index]
        try:
            yield PromptRow(entry["question"], encode_entry(entry), where, entry if needs.columns else None)
        except TypeError as error:
            raise DataError(f"{where}: the entry cannot be sent to generators ({error}): choose another task") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
