"""Errors of the endpoints, all in one shape: RFC 9457, application/problem+json.

Guarantees: every response with status 400 or above is a `Problem`, including those of the framework and of our own bugs. The
only exceptions are health endpoints, which have their own models. The OpenAPI document lists the errors of each endpoint.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from services.operations.control import InvalidRequest, Refused
from services.protocol.errors import NotFound, OutOfOrder, StoreError

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """An error (RFC 9457): what went wrong, and what to do about it."""

    type: str = "about:blank"
    title: str
    """Meaning of the status."""
    status: int
    detail: str
    """Description of the fault in this request."""


_MEANINGS = {
    400: "The request is malformed.",
    401: "The token is missing or unknown.",
    403: "The token is read-only.",
    404: "The run has no such item.",
    405: "The method is not allowed here.",
    409: "The state of the run does not allow this request.",
    413: "The body is too long or has no Content-Length.",
    422: "A parameter or the body is invalid.",
    503: "Redis does not respond, or the run is being copied or restored: try again.",
}

_STATUSES = {NotFound: 404, Refused: 409, OutOfOrder: 409, InvalidRequest: 422, StoreError: 503, RedisError: 503}
"""What an error of ours answers."""


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error response."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return JSONResponse(body.model_dump(), status, headers, media_type=MEDIA_TYPE)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of an endpoint with these errors, in addition to those common to all endpoints of its kind."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def install(app: FastAPI) -> None:
    """Make the app respond to errors in this shape, and document them."""
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    for kind in _STATUSES:
        app.add_exception_handler(kind, _on_known_error)
    app.add_exception_handler(Exception, _on_bug)
    app.openapi = lambda: _document(app)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers, detail = dict(error.headers or {}), error.detail
    if detail == HTTPStatus(error.status_code).phrase:  # the framework's own, of a path or method that no endpoint has
        allowed = headers.get("Allow", "")
        remedy = f"use {allowed}" if allowed else "/openapi.json lists the endpoints of this service, docs/reference/rest.md all"
        detail = f"{detail}: {request.method} {request.url.path[:200]}; {remedy}"
    return problem(error.status_code, detail, headers)


async def _on_known_error(_: Request, error: Exception) -> Response:
    status = next(_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)
    return problem(status, str(error), {"Retry-After": "1"} if status == 503 else None)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):  # left undecoded, since it was not declared to be JSON
        sent = request.headers.get("content-type", "")
        return problem(422, f'content-type: {sent[:100]!r} is not JSON: send the header "content-type: application/json"')
    return problem(422, "; ".join(_fault(fault) for fault in error.errors()))


def _fault(fault: dict[str, Any]) -> str:
    """Return one line: where the fault is, and what it is."""
    *there, last = map(str, fault["loc"])
    match fault["type"]:
        case "json_invalid":
            return f"body: not JSON at character {last}: {fault['ctx']['error']}"
        case "extra_forbidden":
            return f"{'.'.join([*there, last])}: there is no such field"
        case _:
            return f"{'.'.join([*there, last])}: {fault['msg']}"


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("request failed", method=request.method, path=request.url.path, exc_info=error)
    return problem(500, f"internal error ({type(error).__name__}): see the log of the service")


def _document(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document, with the errors common to all endpoints of a kind added."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                statuses = [400, *(422 for status in operation["responses"] if status == "422")]
                if path.startswith("/v1/"):
                    statuses += [401, 503] if method == "get" else [401, 403, 413, 503]
                operation["responses"] |= {str(status): answer for status, answer in problems(*statuses).items()}
        app.openapi_schema = document
    return app.openapi_schema
