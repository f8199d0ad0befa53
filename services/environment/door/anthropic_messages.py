"""`POST /v1/messages`, as Anthropic defines it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from services.environment.door.fields import flag, ignored, listed, overrides, refuse_unsupported, shown, text
from services.environment.door.turns import Question, RequestRefused, TurnReply

STOPS = {"stop": "end_turn", "length": "max_tokens"}
HONOURED = {"messages", "system", "tools", "stop_sequences", "max_tokens", "stream"}


def read(body: Mapping[str, Any]) -> Question:
    """Return the request in a body. Raises `RequestRefused`."""
    choice: Any = body.get("tool_choice") or {}
    kind = cast("dict[str, Any]", choice).get("type", "auto") if isinstance(choice, dict) else choice
    refuse_unsupported(body)
    system = _texts("system", body["system"]) if body.get("system") else ""
    messages = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(listed(body, "messages")):
        messages += _messages(f"messages[{i}]", message)
    return Question(
        messages=messages,
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(listed(body, "tools"))] if kind != "none" else [],
        overrides=overrides(body, "stop_sequences", "max_tokens"),
        stream=flag(body, "stream"),
        ignored=ignored(body, HONOURED),
    )


def reply(question: Question, completion: TurnReply, pieces: Sequence[str], base: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the reply."""
    message = completion.message
    content: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    content += [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls", ())
    ]
    ended = STOPS[completion.generated.finish]
    return {
        "id": base["id"],
        "type": "message",
        "role": "assistant",
        "model": base["model"],
        "content": content,
        "stop_reason": "tool_use" if message.get("tool_calls") and ended == "end_turn" else ended,
        "stop_sequence": None,
        "usage": {"input_tokens": completion.usage.prompt_tokens, "output_tokens": completion.usage.completion_tokens},
    }


def events(question: Question, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream that delivers a reply, block by block."""
    usage = {**body["usage"], "output_tokens": 0}
    begun: dict[str, Any] = {**body, "content": [], "stop_reason": None, "usage": usage}
    yield _event("message_start", message=begun)
    for index, block in enumerate(body["content"]):
        empty: dict[str, Any]
        delta: dict[str, Any]
        match block["type"]:
            case "text":
                empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
            case "thinking":
                empty, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
            case _:
                empty, delta = (
                    {"input": dict[str, Any]()},
                    {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
                )
        yield _event("content_block_start", index=index, content_block={**block, **empty})
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage={"output_tokens": body["usage"]["output_tokens"]})
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return kind, {"type": kind, **fields}


def _messages(where: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one of Anthropic's messages in OpenAI's form: results of tools are separate messages, before the user's text."""
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise RequestRefused(f"{where}.role = {shown(role)}: use user or assistant")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestRefused(f"{where}.content must be a string or a list of blocks")
    said = _Said()
    for i, block in enumerate(cast("list[object]", content)):
        said.add(f"{where}.content[{i}]", block)
    if role == "assistant":
        return [said.as_assistant()]
    own = [{"role": role, "content": "\n".join(said.texts)}] if said.texts or not said.results else []
    return [*said.results, *own]


class _Said:
    """The blocks of a message, by kind."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.results: list[dict[str, Any]] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, where: str, block: object) -> None:
        """Add a block."""
        if not isinstance(block, dict):
            raise RequestRefused(f"{where} must be an object")
        fields = cast("dict[str, Any]", block)
        match fields.get("type"):
            case "text":
                self.texts.append(text(fields, "text", f"{where}."))
            case "thinking":
                self._thoughts.append(text(fields, "thinking", f"{where}."))
            case "redacted_thinking":
                pass  # not of this model
            case "tool_use":
                function: dict[str, Any] = {"name": text(fields, "name", f"{where}."), "arguments": fields.get("input") or {}}
                self._calls.append({"id": text(fields, "id", f"{where}."), "type": "function", "function": function})
            case "tool_result":
                result = _texts(f"{where}.content", fields["content"]) if fields.get("content") else ""
                named = text(fields, "tool_use_id", f"{where}.")
                self.results.append({"role": "tool", "tool_call_id": named, "content": result})
            case kind:
                raise RequestRefused(f"{where} has type {shown(kind)}: the model reads text only")

    def as_assistant(self) -> dict[str, Any]:
        """Return the assistant's message with these blocks."""
        return {
            "role": "assistant",
            "content": "\n".join(self.texts),
            **({"reasoning_content": "\n".join(self._thoughts)} if self._thoughts else {}),
            **({"tool_calls": self._calls} if self._calls else {}),
        }


def _texts(where: str, value: object) -> str:
    """Return a string, or the text of a list of text blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestRefused(f"{where} must be a string or a list of text blocks")
    said: list[str] = []
    for i, block in enumerate(cast("list[object]", value)):
        fields = cast("dict[str, Any]", block) if isinstance(block, dict) else {}
        if fields.get("type") != "text":
            raise RequestRefused(f"{where}[{i}] has type {shown(fields.get('type'))}: the model reads text only")
        said.append(text(fields, "text", f"{where}[{i}]."))
    return "\n".join(said)


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return one of Anthropic's tools in OpenAI's form."""
    if tool.get("type") not in (None, "custom"):
        raise RequestRefused(f"{where}.type = {shown(tool['type'])}: only tools of your own are supported")
    function = {"name": text(tool, "name", f"{where}."), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function | {"description": tool.get("description")}}
