"""Authorizes requests by bearer tokens with the scopes `read` and `operate`, and limits their size.

Guarantees: a token that may operate may also read. All tokens are compared, each in constant time, and none is logged. A body is
never read beyond `BODY_LIMIT_BYTES`, or what the app allows for its path (`state.body_limits`). Health and
metrics need no token, because probes and scrapers have none.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Any, Literal

from fastapi import Depends, HTTPException, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.http.credentials import ApiTokens
from services.http.problems import problem

BODY_LIMIT_BYTES = 64 * 1024
BEARER = HTTPBearer(auto_error=False, description="A token of the run. Scope `read` allows reading; `operate` allows everything.")
# at module level: FastAPI resolves annotations by the module's names

Scope = Literal["", "read", "operate"]


def scope_of(tokens: ApiTokens, given: str) -> Scope:
    """Return the scope of a token; empty: the token is unknown."""
    operates = hmac.compare_digest(given.encode(), tokens.operate.encode())
    reads = hmac.compare_digest(given.encode(), tokens.read.encode())
    return "operate" if operates else "read" if reads and tokens.read else ""


def token_guard(tokens: ApiTokens, needed: Literal["read", "operate"]) -> Any:
    """Return a dependency that admits only requests with the needed scope. Without a read token, reading needs none."""

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> None:
        if needed == "read" and not tokens.read:
            return
        scope = scope_of(tokens, given.credentials) if given else ""
        if not scope:
            raise HTTPException(
                401, f'this call needs a bearer token of the run with scope "{needed}"', {"WWW-Authenticate": "Bearer"}
            )
        if needed == "operate" and scope != "operate":
            raise HTTPException(
                403, "this token is read-only: use the one in api.token_file",
                {"WWW-Authenticate": 'Bearer error="insufficient_scope", scope="operate"'},
            )  # fmt: skip

    return Depends(check)


async def limit_body(request: Request, call_next: Any) -> Response:
    """Refuse requests whose body is too long, or has no Content-Length. This is a middleware."""
    length, limit = (
        request.headers.get("content-length", "0"),
        request.app.state.body_limits.get(request.url.path, BODY_LIMIT_BYTES),
    )
    if not length.isascii() or not length.isdigit() or int(length) > limit or "transfer-encoding" in request.headers:
        return problem(413, f"the body must have a Content-Length of at most {limit} bytes")
    return await call_next(request)
