"""The tools of an environment that the policy may call. A class's own tools are described by their signatures and docstrings.

Guarantees: whatever a model writes as a call is answered with a text of bounded length, which is the fault if there is one; only
a tool's own exceptions of type `Exception` are returned to the model, and these end nothing. The same applies to a result that
cannot be written as JSON, such as an integer of 5,000 digits. However many calls a turn has, they
take bounded time and space together.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from services.runtime.own_code import described

ERROR_CHARACTERS = 500
ANSWER_CHARACTERS = 200_000
"""Maximum number of characters of a tool's output that the model gets: more than fits into most models' contexts."""
TURN_CHARACTERS = 2 * ANSWER_CHARACTERS
"""Maximum number of characters of all tools' output in a turn: even escaped as JSON, they fit into a record."""
TURN_CALLS = 100
"""Maximum number of calls that are made in a turn."""
TURN_SHARE = 0.5
"""Share of `timeout_s` after which no further call of a turn is started: the rest is for the running one."""

CODE = "python"
"""Name of the built-in tool that runs code, which classes and configurations may list."""


class Callee(Protocol):
    """Something that the policy may call."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def described(self) -> dict[str, Any]:
        """Return its description for chat templates: a JSON schema in OpenAI's form."""
        ...

    async def call(self, arguments: object) -> str:
        """Return its reply to any arguments that a model wrote."""
        ...


class ToolSet(Protocol):
    """Tools of one rollout that share a state, such as a session with a server or a folder."""

    @property
    def tools(self) -> Sequence[Callee]:
        """Return the tools."""
        ...

    def snapshot(self) -> Any:
        """Return the state as JSON; None: it cannot be restored."""
        ...

    def restore(self, state: Any) -> None:
        """Go back to a snapshot."""
        ...

    async def close(self) -> None:
        """Free whatever they hold."""
        ...


class Tool:
    """A method that the policy may call."""

    def __init__(self, method: Callable[..., Any]) -> None:
        """Raises TypeError for a method whose parameters cannot be described."""
        self.name, self._method = method.__name__, method
        self._arguments, self._names, self._schema = _arguments_of(
            getattr(method, "__func__", method), hasattr(method, "__func__")
        )

    @property
    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates take it: a JSON schema in OpenAI's form."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": inspect.getdoc(self._method) or "", "parameters": self._schema},
        }

    async def call(self, arguments: object) -> str:
        """Return the tool's output, or the fault of its arguments."""
        try:
            given = self._arguments.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "arguments"
            return f"Error: {where}: {first['msg']}"[:ERROR_CHARACTERS]
        try:
            said = self._method(**{name: getattr(given, field) for field, name in self._names.items()})
            if inspect.isawaitable(said):
                said = await said
            return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
        except Exception as error:  # reported to the model, which may do better; also of a result that cannot be written
            return f"Error: {described(error)}"[:ERROR_CHARACTERS]


async def answered(
    message: Mapping[str, Any], tools: Mapping[str, Callee], timeout_s: float = float("inf")
) -> list[dict[str, Any]]:
    """Call the tools that an assistant's message calls, one after the other; return a message for each call, or none.

    `timeout_s` is the time limit of a reply. Calls that would exceed it, or the limits above, are not made, and the reply says
    so.
    """
    replies: list[dict[str, Any]] = []
    began, room = time.monotonic(), TURN_CHARACTERS
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        tool = tools.get(function["name"])
        if number >= TURN_CALLS:
            said = f"Error: not called, since one message may call at most {TURN_CALLS} tools"
        elif time.monotonic() - began > TURN_SHARE * timeout_s:
            said = "Error: not called, since earlier calls took too long: make fewer calls in one message"
        elif not room:
            said = "Error: not called, since earlier calls returned too much: make fewer calls in one message"
        elif tool is None:
            said = f"Error: there is no tool {function['name']!r}; the tools are {', '.join(tools)}"
            said = shortened(said, min(ERROR_CHARACTERS, room))
            room -= len(said)
        else:
            said = shortened(await tool.call(_arguments(function["arguments"])), min(ANSWER_CHARACTERS, room))
            room -= len(said)
        replies.append({"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": said})
    return replies


def shortened(text: str, limit: int) -> str:
    """Return a text, truncated to at most `limit` characters with a note of its length."""
    if len(text) <= limit:
        return text
    note = f" … ({len(text)} characters, truncated)"
    return (text[: max(0, limit - len(note))] + note)[:limit]


def lists_code(program: object, listed: Sequence[Any]) -> bool:
    """Return whether a program lists the built-in tool that runs code, and has no method of that name."""
    return CODE in listed and not hasattr(program, CODE)


def methods_of(program: object, listed: Sequence[Any]) -> dict[str, Tool]:
    """Return a program's own listed tools by name: methods named in its list, or functions.

    Raises TypeError or AttributeError.
    """
    own = [each for each in listed if each != CODE or hasattr(program, CODE)]
    methods = [getattr(program, each) if isinstance(each, str) else each for each in own]
    return {method.__name__: Tool(method) for method in methods}


def _arguments(text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


@lru_cache(maxsize=1024)
def _arguments_of(function: Callable[..., Any], bound: bool) -> tuple[type[BaseModel], dict[str, str], dict[str, Any]]:
    """Return the arguments of a function as a model, as parameters by the model's fields, and as a JSON schema, cached.

    `bound`: the first parameter is bound. The fields have names of their own, since models reserve some, such as `model_config`
    and those that begin with an underscore.
    """
    hints = get_type_hints(function)
    fields, names = dict[str, Any](), dict[str, str]()
    for name, parameter in list(inspect.signature(function).parameters.items())[bound:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {function.__name__!r}: parameter {name!r} must be one that can be given by name")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = f"parameter_{len(fields)}"
        fields[field], names[field] = (hints.get(name, Any), default), name
    model = create_model(function.__name__, __config__=ConfigDict(alias_generator=names.__getitem__), **fields)
    schema = model.model_json_schema()
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    schema.setdefault("properties", {})
    return model, names, schema
