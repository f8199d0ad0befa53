"""`POST /v1/responses`, as OpenAI defines it, but stateless: each request brings its whole conversation. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from services.environment.door.chat_completions import logprobs_of
from services.environment.door.fields import flag, ignored, listed, overrides, refuse_unsupported, shown, text
from services.environment.door.turns import Question, RequestRefused, TurnReply

UNSUPPORTED: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("previous_response_id", ("",)),
    ("conversation", ("",)),
    ("background", (False,)),
    ("prompt", ()),
)
HONOURED = {
    "input",
    "instructions",
    "tools",
    "stop",
    "max_output_tokens",
    "stream",
    "include",
    *(name for name, _ in UNSUPPORTED),
}
ECHOED = ("instructions", "metadata", "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p")
SKIPPED = ("item_reference", "web_search_call", "file_search_call")


def read(body: Mapping[str, Any]) -> Question:
    """Return the request in a body. Raises `RequestRefused`."""
    refuse_unsupported(body, *UNSUPPORTED)
    instructions = [{"role": "system", "content": text(body, "instructions")}] if body.get("instructions") else []
    include = body.get("include")
    tools = listed(body, "tools") if body.get("tool_choice") != "none" else []
    return Question(
        messages=instructions + _messages(body.get("input")),
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)],
        overrides=overrides(body, "stop", "max_output_tokens"),
        stream=flag(body, "stream"),
        logprobs=isinstance(include, list) and "message.output_text.logprobs" in cast("list[object]", include),
        ignored=ignored(body, HONOURED),
        echo={name: body[name] for name in ECHOED if body.get(name) is not None},
    )


def reply(question: Question, completion: TurnReply, pieces: Sequence[str], base: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the reply."""
    message, cut = completion.message, completion.generated.finish == "length"
    prompt, completed = completion.usage
    output: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        output.append({"id": f"rs_{base['id']}", "type": "reasoning", "summary": [], "content": [thought]})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        logprobs: list[Any] = logprobs_of(completion, pieces)["content"] if question.logprobs else []
        part: dict[str, Any] = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": logprobs}
        output.append(
            {"id": f"msg_{base['id']}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        )
    for call in calls:
        named = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], "status": "completed"}
        output.append(named | {"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
    return {
        "id": base["id"],
        "object": "response",
        "created_at": base["created"],
        "model": base["model"],
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "previous_response_id": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        **question.echo,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completed,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completed,
        },
    }


def events(question: Question, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream that delivers a reply, item by item."""
    begun: dict[str, Any] = {**body, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    for number, (kind, fields) in enumerate(_events(body, begun)):
        yield kind, {"type": kind, "sequence_number": number, **fields}


def _events(body: dict[str, Any], begun: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(body["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        opened: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **opened}}
        if item["type"] == "function_call":
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, "arguments": item["arguments"], "name": item["name"]}
        elif item["type"] == "message":
            part = item["content"][0]
            at = {**place, "content_index": 0}
            yield "response.content_part.added", {**at, "part": {**part, "text": "", "logprobs": []}}
            yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": part["logprobs"]}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": part["logprobs"]}
            yield "response.content_part.done", {**at, "part": part}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{body['status']}", {"response": body}


def _messages(value: object) -> list[dict[str, Any]]:
    """Return the input in the form of chat completions: an assistant's reasoning, text and tool calls become one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestRefused("input must be a string or a list of items")
    messages: list[dict[str, Any]] = []
    open_reply: dict[str, Any] | None = None
    for i, item in enumerate(cast("list[object]", value)):
        if not isinstance(item, dict):
            raise RequestRefused(f"input[{i}] must be an object")
        fields = cast("dict[str, Any]", item)
        kind = fields.get("type", "message")
        if kind in SKIPPED:
            continue
        part = _part(f"input[{i}]", kind, fields)
        if part["role"] != "assistant":
            open_reply = None
            messages.append(part)
        elif open_reply is not None and not (part.get("content") and open_reply.get("tool_calls")):
            _join(open_reply, part)
        else:
            open_reply = part
            messages.append(part)
    return messages


def _part(where: str, kind: object, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return one item as a message, or as a part of the assistant's."""
    match kind:
        case "message":
            return {"role": fields.get("role"), "content": fields.get("content")}
        case "function_call":
            function = {"name": text(fields, "name", f"{where}."), "arguments": fields.get("arguments") or "{}"}
            call = {"id": text(fields, "call_id", f"{where}."), "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": text(fields, "call_id", f"{where}."), "content": fields.get("output")}
        case "reasoning":
            thoughts = [text(part, "text", f"{where}.content.") for part in listed(fields, "content")]
            return {"role": "assistant", "content": "", "reasoning_content": "\n".join(thoughts)}
        case _:
            raise RequestRefused(f"{where} has type {shown(kind)}: use messages, function calls and their outputs")


def _join(message: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a part of the assistant's message to what precedes it."""
    if part.get("tool_calls"):
        message["tool_calls"] = [*message.get("tool_calls", []), *part["tool_calls"]]
    if part.get("reasoning_content"):
        message["reasoning_content"] = "\n".join(filter(None, [message.get("reasoning_content"), part["reasoning_content"]]))
    if part.get("content"):
        before = message.get("content")
        message["content"] = [*_parts(before), *_parts(part["content"])] if before else part["content"]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else cast("list[Any]", content)


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function in the form of chat completions."""
    if tool.get("type") != "function":
        raise RequestRefused(f"{where}.type = {shown(tool.get('type'))}: only functions are supported")
    return {"type": "function", "function": {key: tool.get(key) for key in ("name", "description", "parameters")}}
