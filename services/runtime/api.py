"""The REST endpoints every service has (docs/design.md, section 9).

Guarantees: mutating calls need the bearer token; errors have one shape (RFC 9457, application/problem+json); liveness
means that every loop made progress within its limit, readiness that the pod would do work now.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from services.protocol.config import ConfigError
from services.protocol.errors import StoreError

if TYPE_CHECKING:
    from services.runtime.service import Service

BODY_LIMIT_BYTES = 64 * 1024
BEARER = HTTPBearer(auto_error=False)  # at module level: FastAPI resolves annotations by the module's names
Role = Literal["generator", "dataprep", "trainer"]


class Reason(BaseModel):
    """Why an operator does something; kept with the desired state."""

    why: str = Field(default="", max_length=200)


class LoopHealth(BaseModel):
    """Progress of one supervised loop."""

    alive: bool
    silent_s: float
    limit_s: float | None
    failures: int


class Live(BaseModel):
    """Liveness: every loop made progress within its limit."""

    alive: bool
    loops: dict[str, LoopHealth]


class Ready(BaseModel):
    """Readiness: the pod would do work now."""

    ready: bool
    why_not: str


class Desired(BaseModel):
    """Desired state of a role after a call."""

    role: Role
    paused: bool
    why: str


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error answer, RFC 9457."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return JSONResponse(body, status, headers, media_type="application/problem+json")


def token_guard(token: str) -> Any:
    """A dependency that lets only the bearer of `token` through; compared in constant time."""

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> None:
        if given is None or not hmac.compare_digest(given.credentials.encode(), token.encode()):
            raise HTTPException(401, "this call needs the run's bearer token", {"WWW-Authenticate": "Bearer"})

    return Depends(check)


def make_app(service: Service, token: str) -> FastAPI:
    """The common endpoints; a service adds its own to `service.app`, with `app.state.guard` on mutating ones."""
    app = FastAPI(title=f"grpo {service.kind}", version="1", docs_url="/docs", redoc_url=None)
    app.state.guard = token_guard(token)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(StoreError, _on_store_error)
    app.add_exception_handler(RedisError, _on_store_error)
    app.middleware("http")(_limit_body)
    app.include_router(_health(service))
    app.include_router(_control(service, app.state.guard))
    return app


def _health(service: Service) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health/live", response_model=Live, responses={503: {"model": Live}})
    async def live(response: Response) -> Live:
        loops = {
            loop.name: LoopHealth(
                alive=loop.alive, silent_s=round(loop.silent_s, 3), failures=loop.failures,
                limit_s=None if loop.limit_s == float("inf") else loop.limit_s,
            )
            for loop in service.loops
        }  # fmt: skip
        alive = all(loop.alive for loop in loops.values())
        response.status_code = 200 if alive else 503
        return Live(alive=alive, loops=loops)

    @router.get("/health/ready", response_model=Ready, responses={503: {"model": Ready}})
    async def ready(response: Response) -> Ready:
        why_not = service.ready()
        response.status_code = 503 if why_not else 200
        return Ready(ready=not why_not, why_not=why_not)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _control(service: Service, guard: Any) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["control"])

    @router.get("/state")
    async def state() -> dict[str, Any]:
        run = await service.view.refresh()
        return {
            "run": service.config.run.name,
            "pod": {name: getattr(service.status, name) for name in service.status.__struct_fields__},
            "state": None if run is None else vars(run),
        }

    @router.post("/pause", response_model=Desired, dependencies=[guard])
    async def pause(reason: Reason | None = None, role: Role | None = None) -> Desired:
        """Pause this service's role, or another, until resumed; pods that start later stay paused too."""
        asked, why = role or service.kind, (reason.why if reason else "") or "REST"
        await service.store.pause(asked, why)
        return Desired(role=asked, paused=True, why=why)  # type: ignore[arg-type]

    @router.post("/resume", response_model=Desired, dependencies=[guard])
    async def resume(role: Role | None = None) -> Desired:
        """Let the role go on."""
        asked = role or service.kind
        await service.store.resume(asked)
        return Desired(role=asked, paused=False, why="")  # type: ignore[arg-type]

    return router


async def _limit_body(request: Request, call_next: Any) -> Response:
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > BODY_LIMIT_BYTES or "transfer-encoding" in request.headers:
        return problem(413, f"bodies are at most {BODY_LIMIT_BYTES} bytes, with a Content-Length")
    return await call_next(request)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, error.detail, dict(error.headers or {}))


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem(422, "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()))


async def _on_store_error(_: Request, error: Exception) -> Response:
    return problem(503, str(error))


class _Server(uvicorn.Server):
    """A server that leaves signals to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve(service: Service, token: str) -> AsyncIterator[str]:
    """Serve the endpoints beside the loops; yields the URL under which the pod is reached."""
    host, port = service.config.api.host, service.config.api.port
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(
            f"api.port = {port} on {host} cannot be listened on ({error.strerror}): choose another, or 0 for a free one"
        ) from None
    app = make_app(service, token)
    service.app = app
    server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2))
    task = asyncio.create_task(server.serve([listener]))
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    try:
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()
