"""The prompt template of a judge: which variables it may use, and how it becomes text.

Guarantees: a template cannot reach Python's internals (jinja2's sandbox); a variable or a column that does not exist is an error,
never an empty text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from jinja2 import StrictUndefined, TemplateSyntaxError, meta
from jinja2.sandbox import SandboxedEnvironment

from services.runtime.own_code import reported_as

VARIABLES = {
    "completion": frozenset({"question", "prompt", "answer", "row", "completion"}),
    "group": frozenset({"question", "prompt", "answer", "row", "completions"}),
}
"""Scope of a judge -> the variables of its template."""


class _Templates(SandboxedEnvironment):
    """Reads `row.values` and `row.items` as columns, not as the methods of a mapping."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the entry of a mapping, otherwise what jinja2 returns."""
        if isinstance(obj, Mapping) and attribute in obj:
            return cast("Mapping[str, Any]", obj)[attribute]
        return super().getattr(obj, attribute)


class PromptTemplate:
    """A template that compiles and uses only known variables."""

    def __init__(self, text: str, scope: str) -> None:
        """Compile `text`. Raises ValueError for a syntax error or an unknown variable."""
        environment = _Templates(undefined=StrictUndefined)
        try:
            self._template = environment.from_string(text)
            used = meta.find_undeclared_variables(environment.parse(text))
        except TemplateSyntaxError as error:
            raise ValueError(f"prompt is not a valid template (line {error.lineno}: {error.message}); fix it") from None
        if unknown := used - VARIABLES[scope] - environment.globals.keys():
            raise ValueError(
                f'prompt uses the unknown variable {", ".join(sorted(unknown))}; with scope = "{scope}" it may use '
                f"{', '.join(sorted(VARIABLES[scope]))}"
            )

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text. Raises ValueError, e.g. for a column that a row does not have."""
        with reported_as(lambda why: ValueError(f"prompt cannot be rendered: {why}")):  # a filter may meet any value
            return self._template.render(variables)


def question_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of the last user message, or "" without one."""
    for message in reversed(messages):
        if message.get("role") == "user":
            return _text(message.get("content"))
    return ""


def _text(content: Any) -> str:
    """Return a message's content as text: it may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
