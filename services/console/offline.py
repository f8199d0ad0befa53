"""Scores completions without a run: rows of the data, or of a separate file, with all verifiers of a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec

from services.chat.errors import DataError
from services.chat.tokenizers import tokenizer_folder
from services.config import RunConfig
from services.config.data import FileSource, Source
from services.dataprep.prompts.catalogue import row_text
from services.dataprep.prompts.rows import Needs, PromptRow, read_record, read_rows
from services.dataprep.prompts.tokenizer import PromptTokenizer
from services.protocol.entries import decode_entry
from services.verifiers.base import Job


class CompletionLine(msgspec.Struct, frozen=True):
    """One line of a file of completions. Its other fields are those of a data row, if it does not name one."""

    completion: str | list[str]
    source: str = ""  # name of the prompt source; empty: the only one
    row: int | None = None  # number of the data row, from 0


class Offline:
    """Builds groups to score."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.sources = {source.name: source for source in config.all_sources}
        self._rows: dict[str, list[PromptRow]] = {}
        self._tokenizer: PromptTokenizer | None = None

    def group(self, line: bytes, where: str) -> Job:
        """Return the group that a line of a file of completions describes. Raises `DataError`."""
        try:
            record = msgspec.json.decode(line)
            given = msgspec.convert(record, CompletionLine)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise DataError(f'{where}: {error}: write lines such as {{"completion": "…", "row": 0}}') from None
        source = self._source(given.source, where)
        if given.row is None:
            if not isinstance(source, FileSource):
                raise DataError(f'{where}: a completion of the generated source "{source.name}" needs `row`: add it')
            row = read_record(cast("dict[str, Any]", record), source, self._needs(source), where)
        else:
            row = self._row(source, given.row, where)
        completions = [given.completion] if isinstance(given.completion, str) else given.completion
        if not completions:
            raise DataError(f"{where}: completion is an empty list: give at least one")
        return self.job(row, source, completions)

    def job(self, row: PromptRow, source: Source, completions: Sequence[str]) -> Job:
        """Return completions of a row as a group that is to be scored."""
        if self._tokenizer is None:
            self._tokenizer = PromptTokenizer(tokenizer_folder(self._config.model.path), self._config.data)
        tokens = self._tokenizer.completions(completions)
        limit = self._config.sampling.max_tokens
        finish = ["length" if len(ids) >= limit else "stop" for ids in tokens]
        return Job(source.name, list(completions), row.answer, row_text(row, self._config.data), finish, tokens)

    def first_answer(self, source: Source) -> Job:
        """Return the first row of a source with its own answer as the completion. Raises `DataError`."""
        for _, job in self.own_answers(source):
            return job
        raise DataError(f'source "{source.name}" has no rows: add prompts')

    def own_answers(self, source: Source) -> Iterator[tuple[str, Job]]:
        """Yield each row of a source with its own answer as the completion, after its place. Raises `DataError`."""
        for row in read_rows(source, self._needs(source)):
            answer = row.answer if isinstance(source, FileSource) else str(decode_entry(row.answer).get("answer"))
            yield row.where, self.job(row, source, [answer])

    def _source(self, name: str, where: str) -> Source:
        if name in self.sources:
            return self.sources[name]
        if name or len(self.sources) > 1:
            raise DataError(f"{where}: source = {name!r} is not a prompt source: choose from {', '.join(self.sources)}")
        return next(iter(self.sources.values()))

    def _row(self, source: Source, number: int, where: str) -> PromptRow:
        if source.name not in self._rows:
            self._rows[source.name] = list(read_rows(source, self._needs(source)))
        rows = self._rows[source.name]
        if not 0 <= number < len(rows):
            raise DataError(f'{where}: row = {number}, but source "{source.name}" has rows 0 to {len(rows) - 1}: correct it')
        return rows[number]

    def _needs(self, source: Source) -> Needs:
        return Needs.of(self._config.verifiers, source)
