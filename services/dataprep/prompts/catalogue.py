"""The prompts of a run, tokenised once and looked up by row. Rows are numbered through all sources, one after the other.

Guarantees: any fault of a source, the chat template or prompt lengths raises a one-line `DataError` before the run starts; the
same sources and tokenizer have the same digest, and any change of a prompt, of its answer, of a row that verifiers are given, or
of the order of prompts changes it.

Memory: 4 bytes per token plus the text of the answers and of the rows that verifiers are given, since sources are read in chunks.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from services.chat.errors import DataError
from services.chat.tokenizers import tokenizer_folder
from services.config import RunConfig
from services.config.data import Data, Source
from services.dataprep.prompts.order import SourceSpan
from services.dataprep.prompts.rows import Needs, PromptRow, read_rows
from services.dataprep.prompts.tokenizer import PLACEHOLDER, PromptTokenizer, messages_of
from services.dataprep.prompts.tools import tools_of
from services.protocol.messages import Row

ROW_BYTES = 64 * 1024
"""Maximum number of bytes of a row that go along with its ticket: Redis holds the rows of all tickets in progress."""
UNSHOWN = "the chat template does not show the environment's tools to the model"
UNSHOWN_REMEDY = "use a model whose chat template renders `tools`, set data.chat_template to one, or describe them in the prompts"
CHUNK_ROWS = 2048
"""Rows tokenised at a time: enough to occupy the tokenizer's threads, and few enough to hold in memory."""


class Prompt(NamedTuple):
    """A prompt and the data its completions are judged by."""

    tokens: list[int]
    answer: str
    row: str  # as in `Ticket`


class Remark(NamedTuple):
    """A fault of a source that does not fail the run, but that its owner should know of."""

    source: str
    what: str
    remedy: str


class PromptSource:
    """All prompts of `sources`, or of `data.sources` if that is None, by row. `order.PromptOrder` determines their order."""

    def __init__(self, config: RunConfig, sources: Sequence[Source] | None = None) -> None:
        self._tokenizer = PromptTokenizer(tokenizer_folder(config.model.path), config.data)
        self._tokens, self._token_starts = array("i"), array("q", [0])
        self._answers, self._rows = _Texts(), _Texts()
        self._has_texts = False  # whether a prompt of the last source is a text, and not a list of messages
        spans: list[SourceSpan] = []
        self.remarks: list[Remark] = []
        for source in config.data.sources if sources is None else sources:
            first = len(self)
            tools = tools_of(next((each for each in config.environments if each.name == source.environment), None))
            if tools and not self._tokenizer.shows(tools):
                names = ", ".join(tool["function"]["name"] for tool in tools)
                self.remarks.append(Remark(source.name, f"{UNSHOWN}: {names}", UNSHOWN_REMEDY))
            if skipped := self._read(source, config, tools):
                self.remarks.append(
                    Remark(source.name, f"prompts skipped: {skipped}", "raise data.max_prompt_tokens to keep them")
                )
            unused = ["data.system_prompt"] * bool(config.data.system_prompt)
            unused += ["data.user_template"] * (config.data.user_template != PLACEHOLDER)
            if unused and not self._has_texts:
                what = f"{' and '.join(unused)} without effect: every prompt is a list of messages"
                self.remarks.append(Remark(source.name, what, "write it into the messages, or remove it"))
            spans.append(SourceSpan(source.name, source.weight, first, len(self) - first))
        self.spans = tuple(spans)
        """The rows of each source."""
        self.digest = self._digest(config.run.seed, config.data.shuffle)
        """SHA-256 of all token ids, all answers and rows, and the inputs of their order: the identity of the dataset."""

    def __len__(self) -> int:
        return len(self._token_starts) - 1

    def prompt(self, row: int) -> Prompt:
        """Return the prompt of a row."""
        ids = self._tokens[self._token_starts[row] : self._token_starts[row + 1]].tolist()
        return Prompt(ids, self._answers[row], self._rows[row])

    def name_of(self, row: int) -> str:
        """Return the name of the source that a row belongs to."""
        return self.spans[bisect_right(self.spans, row, key=lambda span: span.first) - 1].name

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return int(np.diff(_int64(self._token_starts)).max())

    def _read(self, source: Source, config: RunConfig, tools: Sequence[Mapping[str, Any]]) -> str:
        """Add all rows of a source, whose prompts show `tools`. Return which were left out because they are too long."""
        data, rows, before = config.data, read_rows(source, Needs.of(config.verifiers, source)), len(self)
        self._has_texts, too_long, first, longest = False, 0, "", ("", 0)
        while chunk := list(islice(rows, CHUNK_ROWS)):
            for row, ids in zip(chunk, self._tokenizer.encode(chunk, tools), strict=True):
                if not ids:
                    raise DataError(f"{row.where}: the prompt has no tokens: fill in or remove the row")
                if len(ids) <= data.max_prompt_tokens:
                    self._tokens.extend(ids)
                    self._token_starts.append(len(self._tokens))
                    self._answers.add(row.answer)
                    self._has_texts |= isinstance(row.prompt, str)
                    self._rows.add(row_text(row, data))
                    continue
                too_long += 1
                first = first or f"{row.where}: the prompt has {len(ids)} tokens, more than"
                longest = max(longest, (row.where, len(ids)), key=lambda one: one[1])
        limit = f"data.max_prompt_tokens = {data.max_prompt_tokens}"
        skipped = f"{too_long} rows have" if too_long > 1 else "1 row has"
        skipped += f" more than {limit} tokens, the longest {longest[1]} ({longest[0]})"
        if too_long and data.long_prompts == "error":
            raise DataError(
                f"{first} {limit}{f'; {skipped}' if too_long > 1 else ''}: "
                'raise data.max_prompt_tokens, remove the rows or set data.long_prompts = "drop"'
            )
        if too_long and len(self) == before:
            raise DataError(f'source "{source.name}" has no rows left: {skipped}: raise data.max_prompt_tokens')
        if len(self) == before:
            place = f"task {source.task!r}" if source.kind == "reasoning_gym" else f"path = {source.path!r}"
            raise DataError(f'source "{source.name}" has no rows ({place}): add prompts')
        return skipped if too_long else ""

    def _digest(self, seed: int, shuffle: bool) -> str:
        digest = hashlib.sha256(msgspec.json.encode((seed, shuffle, self.spans)))
        columns = [_int64(self._token_starts), np.frombuffer(self._tokens, np.int32), _int64(self._answers.starts)]
        if self._rows.body:
            columns.append(_int64(self._rows.starts))
        for column in columns:
            digest.update(column.astype(column.dtype.newbyteorder("<"), copy=False).data)
        digest.update(self._answers.body)
        digest.update(self._rows.body)
        return digest.hexdigest()


class _Texts:
    """Texts, concatenated as UTF-8."""

    def __init__(self) -> None:
        self.body, self.starts = bytearray(), array("q", [0])

    def add(self, text: str) -> None:
        self.body += text.encode("utf-8", "replace")
        self.starts.append(len(self.body))

    def __getitem__(self, row: int) -> str:
        return self.body[self.starts[row] : self.starts[row + 1]].decode()


def _int64(numbers: array[int]) -> np.ndarray:
    return np.frombuffer(numbers, np.int64)


def row_text(row: PromptRow, data: Data) -> str:
    """Return the JSON of the part of a row that verifiers are given, or "" if they are given nothing. Raises `DataError`."""
    if row.columns is None:
        return ""
    try:
        text = msgspec.json.encode(Row(messages_of(row, data), row.columns), enc_hook=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{row.where}: the row cannot be sent to verifiers ({error}): name the fields to send in `columns`"
        ) from None
    if len(text) > ROW_BYTES:
        sizes = {name: len(repr(value)) for name, value in row.columns.items()}
        largest = max(sizes, key=lambda name: sizes[name], default="")
        raise DataError(
            f"{row.where}: prompt and fields of the row have {len(text)} bytes, but a ticket carries at most {ROW_BYTES}; the "
            f"largest field is {largest!r}: name the fields to send in `columns` of the source"
        )
    return text.decode()
