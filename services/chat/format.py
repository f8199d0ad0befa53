"""Converts messages to text and tokens, and sampled text back to messages, by the model's chat template and family.

Guarantees: a conversation renders as dataprep renders prompts; whatever a model sampled becomes a message: text that looks like a
tool call but is not one stays text, with an error to return to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from services.chat.calls import MalformedCall, Parser, ToolCall
from services.chat.json_calls import deepseek, hermes, llama3, mistral
from services.chat.messages import BadMessages
from services.chat.pythonic import pythonic
from services.chat.reply import MARKS as MARKS_OF_REASONING
from services.chat.reply import opening_of, split_reply
from services.chat.templates import TOOL_FORMAT, TOOL_FORMAT_KEY, TemplateRejection, chat_template
from services.chat.tokenizers import load_tokenizer
from services.chat.xml_calls import glm4, qwen3_coder
from services.config import ConfigError
from services.config.data import Data

SENTINEL = "\u2063reply\u2063"
"""Stands for a reply in a rendering: invisible separators, which no template adds or trims."""
CACHED_PROMPTS = 64
"""Rendered texts whose tokens are kept: the rollouts of a group begin with the same one."""
CACHED_CHARACTERS = 1 << 18
"""Maximum length of such a text: a program may send anything."""
SHRINKS = 4
"""Maximum number of characters that a tokenizer which normalises text, such as accents, may merge into one."""
PARSERS: dict[str, Parser] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3,
    "mistral": mistral,
    "deepseek": deepseek,
    "pythonic": pythonic,
    "glm4": glm4,
}
MARKS = (
    ("<arg_key>", "glm4"),
    ("<function=", "qwen3_coder"),
    ("tool▁calls▁begin", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("func_name1(params_name1=", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ('"parameters":', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
)
"""A text that templates of each family contain, the most specific first."""


class Parsed(NamedTuple):
    """The contents of a sampled text."""

    content: str
    reasoning: str
    calls: list[ToolCall]
    error: str
    """The fault of a tool call, for the model; empty: none."""


class ChatFormat:
    """The chat format of the model in `model_folder`, as `data` sets it.

    Raises `DataError` if tokenizer or template are unusable, `ConfigError` for an unknown notation of tool calls.
    """

    def __init__(self, model_folder: Path, data: Data) -> None:
        self._tokenizer = load_tokenizer(model_folder)
        self._template = chat_template(model_folder, data)
        source = self._template.source if self._template else ""
        named = str(data.chat_template_options.get(TOOL_FORMAT, ""))
        self.notation_known = bool(family := family_of(source, named))
        """Whether the notation of tool calls is set or shows in the template; otherwise it is taken for that of hermes."""
        self.family = family or "hermes"
        self.thinks = any(end in source for _, end in MARKS_OF_REASONING)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._longest = max(map(len, vocabulary), default=1) * (SHRINKS if self._tokenizer.normalizer else 1)
        self._whole = lru_cache(maxsize=CACHED_PROMPTS)(self._tokens_of)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, generation: bool = True
    ) -> str:
        """Return the text of normalised messages, by default up to where the assistant's next message begins.

        Without a chat template, that is their contents one after the other. Raises `BadMessages`.
        """
        if self._template is None:
            text = "".join(message["content"] for message in messages)
        else:
            try:
                text = self._template.render(messages, tools, generation=generation)
            except TemplateRejection as error:
                raise BadMessages(f"the model's chat template rejects the messages: {error}") from None
        return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be tokenised

    def closing(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the text that ends an assistant's message after `messages`; None if the template hides where it begins."""
        try:
            text = self.render([*messages, {"role": "assistant", "content": SENTINEL}], tools, generation=False)
        except BadMessages:
            return None
        _, found, after = text.rpartition(SENTINEL)
        return after if found else None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a whole rendering, as dataprep tokenises prompts."""
        return list(self._whole(text) if len(text) <= CACHED_CHARACTERS else self._tokens_of(text))

    def encode_after(self, last: int, text: str) -> list[int]:
        """Return the tokens of text that follows token `last`.

        A special token is put before the text while it is split, since tokenizers treat what begins a text and what follows a
        special token differently.
        """
        anchor = self._special.get(last)
        if anchor is None:
            return self._encoded(text, False)
        ids = self._encoded(anchor + text, False)
        return ids[1:] if ids[:1] == [last] else self._encoded(text, False)

    def exceeds(self, text: str, tokens: int) -> bool:
        """Return whether a text certainly has more tokens, without splitting it, which takes 0.4 s per megabyte."""
        return len(text) > self._longest * tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def piece(self, token: int) -> str:
        """Return the text of one token."""
        return self.decode([token])

    def end_text(self, ids: Sequence[int], finish: str) -> str:
        """Return the text of the end-of-sequence token that sampled ids end with; empty if they end otherwise."""
        return self._special.get(ids[-1], "") if finish == "stop" and len(ids) else ""

    def opens_thinking(self, rendering: str) -> bool:
        """Return whether a rendering ends with the mark that begins the reasoning, so that the model does not sample it."""
        return self.thinks and bool(opening_of(rendering))

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = (), *, thinking: bool = False) -> Parsed:
        """Return the contents of sampled text; tool calls only if there are tools. `thinking`: it begins within the reasoning."""
        reasoning, text = self._reasoning(text, thinking)
        if not tools:
            return Parsed(text, reasoning, [], "")
        try:
            found = PARSERS[self.family](text, tools)
        except MalformedCall as error:
            return Parsed(text, reasoning, [], str(error))
        return Parsed(found.content.strip() if found.calls else text, reasoning, found.calls, "")

    def _reasoning(self, text: str, thinking: bool) -> tuple[str, str]:
        """Return the reasoning and the rest. Text that is cut off within the reasoning is reasoning as a whole."""
        if not self.thinks:
            return "", text
        opening = MARKS_OF_REASONING[0][0]
        before, after = split_reply(opening + text if thinking else text)
        reasoning = before.strip()
        for begin, _ in MARKS_OF_REASONING:
            reasoning = reasoning.removeprefix(begin)
        return reasoning.strip(), after.lstrip("\n") if before else after

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        return tuple(self._encoded(text, self._template is None))

    def _encoded(self, text: str, special: bool) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids  # fast: without offsets


def message_of(parsed: Parsed, identifiers: Sequence[str]) -> dict[str, Any]:
    """Return the assistant's message, in OpenAI's form; `error` is ours. `identifiers` name its tool calls."""
    calls = [
        {"id": identifier, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call, identifier in zip(parsed.calls, identifiers, strict=True)
    ]
    return {
        "role": "assistant",
        "content": parsed.content,
        **({"reasoning_content": parsed.reasoning} if parsed.reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
        **({"error": parsed.error} if parsed.error else {}),
    }


def family_of(template: str, named: str = "") -> str:
    """Return the notation named `named`, or the one that shows in the template.

    Return "hermes" for a template that knows no tools, and "" for one that shows them in a notation that is not known. Raises
    `ConfigError` for an unknown name.
    """
    if named:
        if named not in PARSERS:
            raise ConfigError(f"{TOOL_FORMAT_KEY} = {named!r} is unknown: choose from {', '.join(PARSERS)}")
        return named
    return next((family for mark, family in MARKS if mark in template), "" if "tools" in template else "hermes")
