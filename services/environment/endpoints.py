"""The door: the APIs of OpenAI and Anthropic on the loopback interface, each request answered by one rollout's policy.

Guarantees: a request's key names its rollout, and reaches no other; whatever a body holds, the answer is a reply or a 4xx in the
form that the API's own clients read; a request that a client resends gets the turn that it requested before. A 5xx means that the
policy failed; the client should not retry it.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.chat.messages import BadMessages
from services.environment.door import anthropic_messages, chat_completions, responses
from services.environment.door.fields import overruled
from services.environment.door.resends import attempt_of, digest_of
from services.environment.door.turns import Question, RequestRefused, RolloutOver, TurnLost, TurnReply
from services.environment.rollout import LiveRollout
from services.groups.generated import GenerationFailed
from services.protocol.errors import StoreError

MOST_BYTES = 64 << 20
"""Largest body that is read: more text than any model's context holds."""
CLOSED_KEPT = 10_000
"""Keys of ended rollouts that are remembered, to distinguish them from wrong keys."""
OVERRULED = "x-grpo-sampling"
"""Header that names the sampling parameters of the run that were used instead of the request's."""
ERRORS = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error", 413: "request_too_large"}

Event = tuple[str, dict[str, Any]]
"""Name and data of a server-sent event; without a name in OpenAI's older APIs."""


@dataclass
class Door:
    """The rollouts of this pod by their keys, and the address where programs reach the policy."""

    model: str
    """The name under which the policy is listed."""
    open: dict[str, LiveRollout] = field(default_factory=dict[str, LiveRollout])
    closed: dict[str, None] = field(default_factory=dict[str, None])
    url: str = ""

    def rollout(self, key: str) -> LiveRollout | None:
        """Return the rollout that a key names. Raises `RolloutOver`."""
        if key in self.closed:
            raise RolloutOver("the rollout has ended")
        return self.open.get(key)

    async def serve(self) -> None:
        """Serve on the loopback interface until cancelled."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1024)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            settings = uvicorn.Config(make_door(self), log_level="warning", lifespan="off", access_log=False)
            await uvicorn.Server(settings)._serve([listener])  # pyright: ignore[reportPrivateUsage] - handles no signals

    def close(self, key: str) -> None:
        """Refuse further calls of a rollout."""
        self.open.pop(key, None)
        self.closed[key] = None
        if len(self.closed) > CLOSED_KEPT:
            del self.closed[next(iter(self.closed))]


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


def make_door(door: Door) -> FastAPI:
    """Return the application that serves the open rollouts."""
    app = FastAPI(title="grpo door", openapi_url=None)
    for path, dialect in DIALECTS.items():
        app.add_route(path, _endpoint(door, dialect), methods=["POST"])  # bare: nothing for FastAPI to validate

    @app.get("/v1/models")
    async def models(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction] - registered by its decorator
        _rollout(door, request)
        entry = _model(door.model)
        return _json({"object": "list", "data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        _rollout(door, request)
        if name != door.model:
            raise RequestRefused(f"there is no model of this name: use {door.model}", 404, "not_found_error")
        return _json(_model(name))

    refusals = RequestRefused, BadMessages, RecursionError, HTTPException
    for kind in (*refusals, GenerationFailed, TurnLost, StoreError, ClientDisconnect):
        app.add_exception_handler(kind, _error)
    return app


def _endpoint(door: Door, dialect: Dialect) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        rollout = _rollout(door, request)
        data = await _data(request)
        body = _body(data)
        question = dialect.read(body)
        digest, attempt, gone = digest_of(request.url.path, data), attempt_of(request.headers), request.is_disconnected
        if await gone():  # nobody would read the reply, and the resent request may have arrived already
            raise ClientDisconnect
        asked = await rollout.asked.resent(digest, attempt, gone) if attempt else None
        if asked is None:
            base = {"id": f"{dialect.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": door.model}
            turn = rollout.complete(question.messages, question.tools, question.overrides)
            asked = rollout.asked.begin(digest, attempt, gone, turn, base)
        completion = await rollout.asked.reply(asked)
        ids: list[int] = completion.generated.tokens.tolist() if question.logprobs else []
        reply = dialect.reply(question, completion, [rollout.chat.piece(token) for token in ids], asked.base)
        noted = overruled(body, rollout.sampling, question.ignored)
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


def _rollout(door: Door, request: Request) -> LiveRollout:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    rollout = door.rollout(key) if key else None
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


async def _error(request: Request, error: Exception) -> Response:
    """Return an error that both OpenAI's clients and Anthropic's can read."""
    status, code, message = 400, "invalid_request_error", str(error)
    match error:
        case ClientDisconnect():
            return Response(status_code=499)  # as nginx logs it: nobody reads it
        case RequestRefused():
            status, code = error.status, error.code
        case HTTPException():
            status, message = error.status_code, f"{request.method} {request.url.path}: {error.detail}"
        case BadMessages():
            pass
        case RecursionError():
            message = "the body is nested too deeply"
        case GenerationFailed():
            status, code, message = 503, "generation_failed", f"the policy failed: {error}"
        case _:
            status, code, message = 503, "rollout_lost", "the turn could not be stored: the rollout ends here"
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    body = {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": code}}
    return _json(body, status, {"x-should-retry": "false"})
