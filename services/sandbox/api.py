"""The sandbox service's own endpoints, for environments. They take only the token for sandboxes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from starlette.requests import ClientDisconnect

from services.http.authorization import token_guard
from services.http.credentials import ApiTokens
from services.protocol.sandboxes import CLOSE, OPEN, REQUEST_BYTES, RUN, CloseSandbox, OpenSandbox, RunCode, derived_token
from services.runtime.cluster.account import ClusterError
from services.runtime.service import Service
from services.sandbox.keeper import SandboxKeeper

T = TypeVar("T")
LONGEST_WAIT_S = 60.0
LONGEST_CALL_S = 3600.0


def add_routes(service: Service, keeper: SandboxKeeper) -> None:
    """Add the endpoints to the service's app."""
    tokens: ApiTokens = service.app.state.tokens
    guard = token_guard(ApiTokens(derived_token(tokens.operate)), "operate")
    router = APIRouter(tags=["sandbox"], dependencies=[guard], include_in_schema=False)

    @router.post(OPEN, response_class=Response)
    async def open_sandbox(request: Request) -> Response:
        """Give a rollout a sandbox in which nothing has run. Repeated, it finds the same one."""
        asked = await _body(request, OpenSandbox)
        return _packed(await _answer(keeper.open(asked.name, min(asked.wait_s, LONGEST_WAIT_S))))

    @router.post(RUN, response_class=Response)
    async def run_code(request: Request) -> Response:
        """Run code in a sandbox. Repeated, it is the same call."""
        asked = await _body(request, RunCode)
        if not 0 < asked.limit_s <= LONGEST_CALL_S:
            raise HTTPException(422, f"limit_s = {asked.limit_s:g} must be above 0 and at most {LONGEST_CALL_S:g}")
        return _packed(await _answer(keeper.run(asked)))

    @router.post(CLOSE, response_class=Response)
    async def close_sandbox(request: Request) -> Response:
        """Delete a sandbox, if it is there."""
        asked = await _body(request, CloseSandbox)
        return _packed(await _answer(keeper.close(asked.name)))

    for path in (OPEN, RUN, CLOSE):
        service.app.state.body_limits[path] = REQUEST_BYTES
    service.app.include_router(router)


async def _body(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(await request.body(), type=kind)
    except msgspec.DecodeError as error:
        raise HTTPException(422, f"the body is not a {kind.__name__}: {error}") from None
    except ClientDisconnect:  # while it was sending
        raise HTTPException(503, "the caller is gone") from None


async def _answer(doing: Any) -> Any:
    """Return a reply; 503: the caller must retry, since the cluster's API did not answer."""
    try:
        return await doing
    except ClusterError as error:
        raise HTTPException(503, str(error)) from None
    except ValueError as error:
        raise HTTPException(422, str(error)) from None


def _packed(reply: Any) -> Response:
    return Response(msgspec.msgpack.encode(reply), media_type="application/msgpack")
