"""`POST /v1/chat/completions`, as OpenAI defines it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from services.environment.door.fields import flag, ignored, listed, overrides, refuse_unsupported
from services.environment.door.turns import Question, TurnReply

UNSUPPORTED: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("n", (1,)),
    ("top_logprobs", (0,)),
    ("functions", ([],)),
    ("function_call", ("none",)),
    ("modalities", (["text"],)),
)
HONOURED = {
    *("messages", "tools", "stop", "max_completion_tokens", "max_tokens", "stream", "stream_options", "logprobs"),
    *(name for name, _ in UNSUPPORTED),
}


def read(body: Mapping[str, Any]) -> Question:
    """Return the request in a body. Raises `RequestRefused`."""
    refuse_unsupported(body, *UNSUPPORTED)
    options: Any = body.get("stream_options")
    return Question(
        messages=listed(body, "messages"),
        tools=listed(body, "tools") if body.get("tool_choice") != "none" else [],
        overrides=overrides(body, "stop", "max_completion_tokens", "max_tokens"),
        stream=flag(body, "stream"),
        usage=isinstance(options, dict) and cast("Any", options).get("include_usage") is True,
        logprobs=flag(body, "logprobs"),
        ignored=ignored(body, HONOURED),
    )


def reply(question: Question, completion: TurnReply, pieces: Sequence[str], base: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the reply. `pieces` are the texts of the sampled tokens, if requested."""
    choice = {
        "index": 0,
        "message": {"refusal": None, **message_of_reply(completion)},
        "finish_reason": finish_of(completion),
        "logprobs": logprobs_of(completion, pieces) if question.logprobs else None,
    }
    return {**base, "object": "chat.completion", "choices": [choice], "usage": usage_of(completion)}


def chunks(question: Question, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream that delivers a reply: the role, the message, its end, then the usage if requested."""
    choice = body["choices"][0]
    base = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    delta = {key: value for key, value in choice["message"].items() if value is not None and key != "role"}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]

    def chunk(delta: dict[str, Any], finish: str | None, logprobs: object = None) -> tuple[str, dict[str, Any]]:
        return "", {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}]}

    yield chunk({"role": "assistant", "content": ""}, None)
    yield chunk(delta, None, choice["logprobs"])
    yield chunk({}, choice["finish_reason"])
    if question.usage:
        yield "", {**base, "choices": [], "usage": body["usage"]}


def message_of_reply(completion: TurnReply) -> dict[str, Any]:
    """Return the message that a program receives: without text, its content is null."""
    message = {key: value for key, value in completion.message.items() if key != "error"}
    return message | {"content": message["content"] or (None if "tool_calls" in message else "")}


def finish_of(completion: TurnReply) -> str:
    """Return why the reply ended."""
    if completion.generated.finish == "length":
        return "length"
    return "tool_calls" if completion.message.get("tool_calls") else "stop"


def usage_of(completion: TurnReply) -> dict[str, int]:
    """Return the tokens of the turn."""
    prompt, completed = completion.usage
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}


def logprobs_of(completion: TurnReply, pieces: Sequence[str]) -> dict[str, Any]:
    """Return the log-probability of each sampled token."""
    logprobs = completion.generated.logprobs.tolist()
    return {
        "content": [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in zip(pieces, logprobs, strict=True)
        ],
        "refusal": None,
    }
