"""Turns prompts into token ids without torch.

Guarantees: the ids equal those of the model's own tokenizer for the same messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.chat.errors import DataError
from services.chat.templates import TemplateRejection, chat_template
from services.chat.tokenizers import load_tokenizer
from services.config.data import Data
from services.dataprep.prompts.rows import PromptRow

PLACEHOLDER = "{prompt}"


class PromptTokenizer:
    """Turns rows into token ids as `data` specifies, with the tokenizer of the model in `folder`."""

    def __init__(self, folder: Path, data: Data) -> None:
        self._data = data
        if PLACEHOLDER not in data.user_template:
            raise DataError(f"data.user_template = {data.user_template!r} has no {PLACEHOLDER}: add it where the question goes")
        self._tokenizer = load_tokenizer(folder)
        self._template = chat_template(folder, data)

    def encode(self, rows: Sequence[PromptRow], tools: Sequence[Mapping[str, Any]] = ()) -> list[list[int]]:
        """Encode prompts, which show `tools`. Plain text gets the tokenizer's special tokens; templates bring their own."""
        texts = [self._text(row, tools) for row in rows]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._template is None)]

    def shows(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether prompts show tools to the model: not without a chat template, or with one that ignores them."""
        if self._template is None:
            return False
        asked = [{"role": "user", "content": ""}]
        try:
            return self._template.render(asked, tools) != self._template.render(asked)
        except TemplateRejection:  # of these messages; rows are rejected with their reason
            return True

    def _text(self, row: PromptRow, tools: Sequence[Mapping[str, Any]]) -> str:
        if self._template is None:
            if not isinstance(row.prompt, str):
                raise DataError(f"{row.where}: a list of messages needs data.chat_template = true: set it, or use a string")
            return self._data.user_template.replace(PLACEHOLDER, row.prompt)
        try:
            messages = messages_of(row, self._data)
            if messages[-1]["role"] != "assistant":
                return self._template.render(messages, tools)
            return _continued(self._template.render(messages, tools, generation=False), messages[-1], row.where)
        except TemplateRejection as error:
            raise DataError(f"{row.where}: the chat template rejects the prompt: {error}") from None

    def completions(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts as if a model had sampled them, without special tokens."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def messages_of(row: PromptRow, data: Data) -> list[dict[str, Any]]:
    """Return the prompt of a row as chat messages."""
    if not isinstance(row.prompt, str):
        return row.prompt
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": data.user_template.replace(PLACEHOLDER, row.prompt)}]


def _continued(text: str, last: Mapping[str, Any], where: str) -> str:
    """Return a rendering up to where the completion continues its last message, which the assistant has begun."""
    begun = last["content"]
    if not begun.strip() or last.get("tool_calls"):
        raise DataError(f"{where}: the prompt ends with a message of the assistant that cannot be continued: remove it")
    before, found, _ = text.rpartition(begun)
    if not found:  # the template trims it
        before, found, _ = text.rpartition(begun := begun.strip())
    if not found:
        raise DataError(f"{where}: the chat template changes the last message, so that it cannot be continued: remove it")
    return before + begun
