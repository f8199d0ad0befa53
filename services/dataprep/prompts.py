"""The prompts of a run: tokenised once, then looked up by row.

Guarantees: whatever is wrong with source, template or lengths is a `DataError` of one line before the run starts; the same
source and tokenizer have the same digest, and any change of a prompt, an answer or their order changes it.

Memory: 4 bytes a token and the answers' text, whatever the size of the source; the source is read in chunks.
"""

from __future__ import annotations

import hashlib
from array import array
from itertools import islice

import numpy as np

from services.dataprep.errors import DataError
from services.dataprep.rows import read_rows
from services.dataprep.tokenizer import PromptTokenizer, tokenizer_folder
from services.protocol.config import RunConfig
from services.protocol.config.data import Data

CHUNK_ROWS = 2048
"""Rows tokenised at a time: enough for the tokenizer's threads, little enough to hold."""


class PromptSource:
    """All prompts of a run by row. The order they are asked in is `order.PromptOrder`."""

    def __init__(self, config: RunConfig) -> None:
        data = config.data
        tokenizer = PromptTokenizer(tokenizer_folder(config.model.path), data)
        tokens, answers = array("i"), bytearray()
        token_ends, answer_ends = array("q"), array("q")
        too_long = _TooLong(data.max_prompt_tokens)
        rows = read_rows(data.source)
        while chunk := list(islice(rows, CHUNK_ROWS)):
            for row, ids in zip(chunk, tokenizer.encode(chunk), strict=True):
                if not ids:
                    raise DataError(f"{row.where}: the prompt has no tokens: fill or remove it")
                too_long.see(len(token_ends), row.where, len(ids))
                tokens.extend(ids)
                token_ends.append(len(tokens))
                answers += row.answer.encode("utf-8", "replace")
                answer_ends.append(len(answers))
        too_long.check()
        if not token_ends:
            raise DataError(f"data.source has no rows ({_name(data)}): add prompts")
        self._tokens = np.frombuffer(tokens, dtype=np.int32)
        self._token_starts = np.concatenate(([0], np.frombuffer(token_ends, dtype=np.int64)))
        self._answers = bytes(answers)
        self._answer_starts = np.concatenate(([0], np.frombuffer(answer_ends, dtype=np.int64)))
        self.digest = self._digest()
        """SHA-256 of all token ids and answers in order: the identity of the data set."""

    def __len__(self) -> int:
        return len(self._token_starts) - 1

    def prompt(self, row: int) -> tuple[list[int], str]:
        """Token ids and gold answer of a row."""
        ids = self._tokens[self._token_starts[row] : self._token_starts[row + 1]].tolist()
        return ids, self._answers[self._answer_starts[row] : self._answer_starts[row + 1]].decode()

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(np.diff(self._token_starts).max())

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for column in (self._token_starts, self._tokens, self._answer_starts):
            digest.update(column.astype(column.dtype.newbyteorder("<"), copy=False).data)
        digest.update(self._answers)
        return digest.hexdigest()


class _TooLong:
    """Collects prompts over the limit, so that one message tells of all."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._first = self._longest = (0, "", 0)

    def see(self, row: int, where: str, length: int) -> None:
        if length <= self._limit:
            return
        self._count += 1
        if self._count == 1:
            self._first = (row, where, length)
        if length > self._longest[2]:
            self._longest = (row, where, length)

    def check(self) -> None:
        if not self._count:
            return
        row, where, length = self._first
        others = ""
        if self._count > 1:
            others = f"; {self._count} rows are too long, the longest has {self._longest[2]} ({self._longest[1]})"
        raise DataError(
            f"{where}: the prompt of row {row} has {length} tokens, more than data.max_prompt_tokens = {self._limit}{others}: "
            "raise data.max_prompt_tokens or remove the rows"
        )


def _name(data: Data) -> str:
    source = data.source
    return f"task {source.task!r}" if source.kind == "reasoning_gym" else f"path = {source.path!r}"
