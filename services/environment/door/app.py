"""The door: the APIs of OpenAI and Anthropic on the loopback interface, each request answered by one rollout's policy.

Guarantees: a request's key names its rollout, and reaches no other; whatever a body holds, the answer is a reply or a 4xx in the
form that the API's own clients read; a request that a client resends gets the turn that it requested before. A 5xx means that the
policy failed; the client should not retry it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.chat.format import ChatFormat
from services.chat.messages import BadMessages
from services.environment.door import anthropic_messages, chat_completions, responses
from services.environment.door.fields import overruled
from services.environment.door.resends import AskedTurns, attempt_of, digest_of
from services.environment.door.turns import Overrides, Question, RequestRefused, TurnLost, TurnReply
from services.groups.generated import GenerationFailed, SamplingParameters
from services.protocol.errors import StoreError

MOST_BYTES = 64 << 20
"""Largest body that is read: more text than any model's context holds."""
OVERRULED = "x-grpo-sampling"
"""Header that names the sampling parameters of the run that were used instead of the request's."""
ERRORS = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error", 413: "request_too_large"}

Event = tuple[str, dict[str, Any]]
"""Name and data of a server-sent event; without a name in OpenAI's older APIs."""


class OpenRollout(Protocol):
    """A rollout that accepts turns."""

    @property
    def asked(self) -> AskedTurns:
        """Return the turns that resent requests may ask for."""
        ...

    @property
    def chat(self) -> ChatFormat:
        """Return the chat format of its model."""
        ...

    @property
    def sampling(self) -> SamplingParameters:
        """Return the sampling of the run, which no request changes."""
        ...

    async def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], overrides: Overrides) -> TurnReply:
        """Record and return the policy's reply. Raises `BadMessages`, `RequestRefused`, `GenerationFailed` and `TurnLost`."""
        ...


class Rollouts(Protocol):
    """The rollouts of a pod."""

    @property
    def model(self) -> str:
        """Return the name under which the policy is listed."""
        ...

    def rollout(self, key: str) -> OpenRollout | None:
        """Return the rollout that an API key names; None: there is none. Raises `RolloutOver`."""
        ...


@dataclass(frozen=True)
class Dialect:
    """How one endpoint reads requests and writes replies."""

    prefix: str
    """Prefix of the identifiers of its replies."""
    read: Callable[[Mapping[str, Any]], Question]
    reply: Callable[[Question, TurnReply, Sequence[str], dict[str, Any]], dict[str, Any]]
    events: Callable[[Question, dict[str, Any]], Iterator[Event]]
    done: bytes = b"data: [DONE]\n\n"
    """The last event of a stream."""


DIALECTS = {
    "/v1/chat/completions": Dialect("chatcmpl-", chat_completions.read, chat_completions.reply, chat_completions.chunks),
    "/v1/responses": Dialect("resp_", responses.read, responses.reply, responses.events, done=b""),
    "/v1/messages": Dialect("msg_", anthropic_messages.read, anthropic_messages.reply, anthropic_messages.events, done=b""),
}


def make_door(rollouts: Rollouts) -> FastAPI:
    """Return the application that serves these rollouts."""
    app = FastAPI(title="grpo door", openapi_url=None)
    for path, dialect in DIALECTS.items():
        app.add_route(path, _endpoint(rollouts, dialect), methods=["POST"])  # bare: nothing for FastAPI to validate

    @app.get("/v1/models")
    async def models(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction] - registered by its decorator
        _rollout(rollouts, request)
        entry = _model(rollouts.model)
        return _json({"object": "list", "data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        _rollout(rollouts, request)
        if name != rollouts.model:
            raise RequestRefused(f"there is no model of this name: use {rollouts.model}", 404, "not_found_error")
        return _json(_model(name))

    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(BadMessages, _bad_messages)
    app.add_exception_handler(RecursionError, _too_deep)
    app.add_exception_handler(GenerationFailed, _failed)
    app.add_exception_handler(TurnLost, _lost)
    app.add_exception_handler(StoreError, _lost)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _gone)
    return app


def _endpoint(rollouts: Rollouts, dialect: Dialect) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        rollout = _rollout(rollouts, request)
        data = await _data(request)
        body = _body(data)
        question = dialect.read(body)
        digest, attempt, gone = digest_of(request.url.path, data), attempt_of(request.headers), request.is_disconnected
        if await gone():  # nobody would read the reply, and the resent request may have arrived already
            raise ClientDisconnect
        asked = await rollout.asked.resent(digest, attempt, gone) if attempt else None
        if asked is None:
            base = {"id": f"{dialect.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": rollouts.model}
            turn = rollout.complete(question.messages, question.tools, question.overrides)
            asked = rollout.asked.begin(digest, attempt, gone, turn, base)
        completion = await rollout.asked.reply(asked)
        ids: list[int] = completion.generated.tokens.tolist() if question.logprobs else []
        reply = dialect.reply(question, completion, [rollout.chat.piece(token) for token in ids], asked.base)
        noted = overruled(body, rollout.sampling)
        headers = {OVERRULED: noted} if noted else {}
        if not question.stream:
            return _json(reply, headers=headers)
        return StreamingResponse(_stream(dialect, question, reply), media_type="text/event-stream", headers=headers)

    return endpoint


async def _stream(dialect: Dialect, question: Question, reply: dict[str, Any]) -> AsyncIterator[bytes]:
    for name, data in dialect.events(question, reply):
        yield (f"event: {name}\n".encode() if name else b"") + b"data: " + _bytes(data) + b"\n\n"
    if dialect.done:
        yield dialect.done


def _rollout(rollouts: Rollouts, request: Request) -> OpenRollout:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    rollout = rollouts.rollout(key) if key else None
    if rollout is None:
        raise RequestRefused("the API key names no rollout: use the OPENAI_API_KEY that the program was given", 401, ERRORS[401])
    return rollout


async def _data(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MOST_BYTES:
            raise RequestRefused(f"the body has more than {MOST_BYTES} bytes: send less", 413, ERRORS[413])
    return bytes(data)


def _body(data: bytes) -> Mapping[str, Any]:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestRefused(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    return cast("dict[str, Any]", body)


def _model(name: str) -> dict[str, Any]:
    """Return a model as both OpenAI and Anthropic list it."""
    shared = {"id": name, "object": "model", "created": 0, "owned_by": "grpo"}
    return {**shared, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_bytes(body), status, headers, "application/json")


def _bytes(value: object) -> bytes:
    """Return JSON of text from a model or a client: lone surrogates and integers of any length, too, which msgspec refuses."""
    return json.dumps(value, separators=(",", ":")).encode()


def _error(request: Request, status: int, code: str, message: str) -> Response:
    """Return an error that both OpenAI's clients and Anthropic's can read."""
    headers = {"x-should-retry": "false"}
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"message": message, "type": kind, "param": None, "code": code}
    return _json({"type": "error", "error": error}, status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return _error(request, error.status, error.code, str(error))


async def _bad_messages(request: Request, error: Exception) -> Response:
    return _error(request, 400, "invalid_request_error", str(error))


async def _too_deep(request: Request, error: Exception) -> Response:
    return _error(request, 400, "invalid_request_error", "the body is nested too deeply")


async def _failed(request: Request, error: Exception) -> Response:
    return _error(request, 503, "generation_failed", f"the policy failed: {error}")


async def _lost(request: Request, error: Exception) -> Response:
    return _error(request, 503, "rollout_lost", "the turn could not be stored: the rollout ends here")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(request, error.status_code, "invalid_request_error", f"{request.method} {request.url.path}: {error.detail}")


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # as nginx logs it: nobody reads it
