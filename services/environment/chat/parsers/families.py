"""Which notation of tool calls a model's family uses. Pure."""

from __future__ import annotations

from services.config import ConfigError
from services.environment.chat.parsers.calls import Parser
from services.environment.chat.parsers.json_calls import deepseek, hermes, llama3, mistral
from services.environment.chat.parsers.pythonic import pythonic
from services.environment.chat.parsers.xml_calls import glm4, qwen3_coder

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


def family_of(template: str, named: str = "") -> str:
    """Return the notation named `named`, or the one that the template uses; hermes if it shows none.

    Raises `ConfigError` for an unknown name.
    """
    if named:
        if named not in PARSERS:
            raise ConfigError(f"tool_format = {named!r} is unknown: choose from {', '.join(PARSERS)}")
        return named
    return next((family for mark, family in MARKS if mark in template), "hermes")
