"""Authorizes requests by bearer tokens with the scopes `read` and `operate`, and limits their size and parameters.

Guarantees: a token that may operate may also read. A request that changes something is refused if it has a parameter that its
endpoint does not have. All tokens are compared, each in constant time, and none is logged. A body is never read beyond
`BODY_LIMIT_BYTES`, or what the app allows for its path (`state.body_limits`). Health and metrics need no token, because probes
and scrapers have none.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Any, Literal

from fastapi import Depends, HTTPException, Request, Response
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.http.credentials import ApiTokens
from services.http.problems import problem

BODY_LIMIT_BYTES = 64 * 1024
BEARER = HTTPBearer(auto_error=False, description="A token of the run. Scope `read` allows reading; `operate` allows everything.")
# at module level: FastAPI resolves annotations by the module's names

Scope = Literal["", "read", "operate"]
FILES = {
    "operate": "the token in api.token_file (runs/NAME/api-token)",
    "read": "the token in api.token_file or api.read_token_file (runs/NAME/api-token, runs/NAME/api-read-token)",
}
"""Which token a call needs, by its scope."""


def scope_of(tokens: ApiTokens, given: str) -> Scope:
    """Return the scope of a token; empty: the token is unknown."""
    operates = hmac.compare_digest(given.encode(), tokens.operate.encode())
    reads = hmac.compare_digest(given.encode(), tokens.read.encode())
    return "operate" if operates else "read" if reads and tokens.read else ""


def token_guard(tokens: ApiTokens, needed: Literal["read", "operate"]) -> Any:
    """Return a dependency that admits only requests with the needed scope. Without a read token, reading needs none."""

    def check(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> None:
        if needed == "operate" or tokens.read:
            _check_token(tokens, needed, given)
        if needed == "operate":
            _check_parameters(request)

    return Depends(check)


def _check_token(tokens: ApiTokens, needed: Scope, given: HTTPAuthorizationCredentials | None) -> None:
    scope = scope_of(tokens, given.credentials) if given else ""
    if not scope:
        why = "the token is unknown" if given else "there is no token"
        remedy = f'send the header "Authorization: Bearer TOKEN" with {FILES[needed]}'
        raise HTTPException(401, f"{why}: {remedy}", {"WWW-Authenticate": "Bearer"})
    if needed == "operate" and scope != "operate":
        raise HTTPException(
            403,
            f"this token is read-only: use {FILES['operate']}",
            {"WWW-Authenticate": 'Bearer error="insufficient_scope", scope="operate"'},
        )


def _check_parameters(request: Request) -> None:
    """Refuse parameters that the endpoint does not have, and repeated ones: these would otherwise have no effect."""
    known = sorted(field.alias for field in get_flat_dependant(request.scope["route"].dependant).query_params)
    if unknown := sorted({*request.query_params} - {*known}):
        there = f"those of this call are {', '.join(known)}" if known else "this call has none"
        raise HTTPException(422, f"query.{unknown[0][:100]}: there is no such parameter; {there}")
    for name in request.query_params:
        if len(request.query_params.getlist(name)) > 1:
            raise HTTPException(422, f"query.{name}: this parameter is given more than once; give it once")


async def limit_body(request: Request, call_next: Any) -> Response:
    """Refuse requests whose body is too long, or has no Content-Length. This is a middleware."""
    length = request.headers.get("content-length", "0")
    limit = request.app.state.body_limits.get(request.url.path, BODY_LIMIT_BYTES)
    if not length.isascii() or not length.isdigit() or int(length) > limit or "transfer-encoding" in request.headers:
        return problem(413, f"the body must have a Content-Length of at most {limit} bytes")
    return await call_next(request)
