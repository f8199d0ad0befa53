"""`POST /v1/completions`, as OpenAI defines it: text, or token ids, continued without a chat template. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from services.environment.door.chat_completions import usage_of
from services.environment.door.fields import flag, overrides, refuse_unsupported
from services.environment.door.turns import Question, RequestRefused, TurnReply

UNSUPPORTED: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("n", (1,)),
    ("best_of", (1,)),
    ("echo", (False,)),
    ("suffix", ("",)),
    ("logprobs", (False, True, 0, 1)),  # a number is a count of alternatives: there is only the sampled token
)
LONGEST_DEFAULT = 16
"""Tokens of a completion that names no limit: OpenAI's default."""


def read(body: Mapping[str, Any]) -> Question:
    """Return the request in a body. Raises `RequestRefused`."""
    refuse_unsupported(body, *UNSUPPORTED)
    options: Any = body.get("stream_options")
    chosen = overrides(body, "stop", "max_tokens")
    return Question(
        prompt=_prompt(body.get("prompt")),
        overrides=chosen._replace(max_tokens=chosen.max_tokens or LONGEST_DEFAULT),
        stream=flag(body, "stream"),
        usage=isinstance(options, dict) and cast("Any", options).get("include_usage") is True,
        logprobs=body.get("logprobs") not in (None, False),
    )


def reply(question: Question, completion: TurnReply, pieces: Sequence[str], base: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the reply. `pieces` are the texts of the sampled tokens, if requested."""
    choice = {
        "index": 0,
        "text": completion.message["content"],
        "finish_reason": completion.generated.finish,
        "logprobs": _logprobs(completion, pieces) if question.logprobs else None,
    }
    return {**base, "object": "text_completion", "choices": [choice], "usage": usage_of(completion)}


def chunks(question: Question, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream that delivers a reply: the text, then the usage if requested."""
    yield "", {key: value for key, value in body.items() if key != "usage"}
    if question.usage:
        yield "", {**body, "choices": []}


def _prompt(value: object) -> str | list[int]:
    """Return the prompt: a string, token ids, or a list of one of these."""
    if isinstance(value, list) and len(cast("list[object]", value)) == 1 and isinstance(value[0], str | list):
        value = cast("object", value[0])
    if isinstance(value, str):
        return value
    entries = cast("list[object]", value) if isinstance(value, list) else []
    if not entries or not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
        raise RequestRefused("prompt must be one string or one list of token ids")
    return cast("list[int]", entries)


def _logprobs(completion: TurnReply, pieces: Sequence[str]) -> dict[str, Any]:
    offsets, offset = list[int](), 0
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece)
    logprobs = completion.generated.logprobs.tolist()
    return {"tokens": list(pieces), "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
