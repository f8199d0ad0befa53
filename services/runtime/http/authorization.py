"""Who may call an endpoint: bearer tokens with the scopes `read` and `operate`, and how large a request may be.

Guarantees: whoever may operate may read; tokens are compared in constant time, each of them whatever the others say, and are
in no log; a body is never read beyond `BODY_LIMIT_BYTES`. Health and metrics are open, as probes and scrapers have no token.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Any, Literal

from fastapi import Depends, HTTPException, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.runtime.http.credentials import ApiTokens
from services.runtime.http.problems import problem

BODY_LIMIT_BYTES = 64 * 1024
BEARER = HTTPBearer(auto_error=False, description="A token of the run: `read` may look, `operate` may do everything.")
# at module level: FastAPI resolves annotations by the module's names

Scope = Literal["", "read", "operate"]


def scope_of(tokens: ApiTokens, given: str) -> Scope:
    """What the bearer of a token may do; empty: nothing."""
    operates = hmac.compare_digest(given.encode(), tokens.operate.encode())
    reads = hmac.compare_digest(given.encode(), tokens.read.encode())
    return "operate" if operates else "read" if reads and tokens.read else ""


def token_guard(tokens: ApiTokens, needed: Literal["read", "operate"]) -> Any:
    """A dependency that lets only those through who may do what is needed; without a read token everybody may read."""

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> None:
        if needed == "read" and not tokens.read:
            return
        scope = scope_of(tokens, given.credentials) if given else ""
        if not scope:
            raise HTTPException(
                401, f"this call needs a bearer token of the run that may {needed}", {"WWW-Authenticate": "Bearer"}
            )
        if needed == "operate" and scope != "operate":
            raise HTTPException(
                403, "this token may look, and change nothing: use the one of api.token_file",
                {"WWW-Authenticate": 'Bearer error="insufficient_scope", scope="operate"'},
            )  # fmt: skip

    return Depends(check)


async def limit_body(request: Request, call_next: Any) -> Response:
    """A middleware that refuses bodies that are too long, or do not say how long they are."""
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length) > BODY_LIMIT_BYTES or "transfer-encoding" in request.headers:
        return problem(413, f"bodies are at most {BODY_LIMIT_BYTES} bytes, with a Content-Length")
    return await call_next(request)
