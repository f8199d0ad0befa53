"""The REST endpoints of every service (docs/design.md, section 9).

Guarantees: reading needs the scope `read` if there is a token for it, and changing needs `operate` (authorization.py). Errors
have one shape (problems.py). Every call is idempotent. Liveness means that every loop made progress within its limit; readiness
means that the pod can do work now.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from services.config import ConfigError
from services.http.authorization import limit_body, token_guard
from services.http.certificate import Certificate
from services.http.credentials import ApiTokens
from services.http.endpoints import control_router
from services.http.models import Live, LoopHealth, Ready
from services.http.problems import install
from services.runtime.metrics import exposition
from services.runtime.service import Service

ADDRESS_ENV = "GRPO_ADDRESS"


def make_app(service: Service, tokens: ApiTokens) -> FastAPI:
    """Return the app with the common endpoints.

    A service adds its own to `service.app`, with `app.state.guard` on those that change something and `app.state.reader` on the
    others.
    """
    # FastAPI's page of the endpoints runs a script from another server, which must not read the token that the console keeps.
    docs_url = None if service.kind == "web" else "/docs"
    app = FastAPI(
        title=f"grpo {service.kind}",
        version="1",
        docs_url=docs_url,
        redoc_url=None,
        description="Endpoints of a service of a run. Every call is idempotent and may be repeated.",
    )
    service.app = app
    app.state.tokens, app.state.body_limits = tokens, {}
    app.state.guard, app.state.reader = token_guard(tokens, "operate"), token_guard(tokens, "read")
    install(app)
    app.middleware("http")(limit_body)
    app.include_router(_health(service))
    app.include_router(control_router(service))
    return app


def _health(service: Service) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health/live", response_model=Live, responses={503: {"model": Live}})
    async def live(response: Response) -> Live:
        """Check whether every loop of this pod made progress within its limit. 503: one did not; restart the pod."""
        loops = {
            loop.name: LoopHealth(
                alive=loop.alive,
                silent_s=round(loop.silent_s, 3),
                failures=loop.failures,
                limit_s=None if loop.limit_s == float("inf") else loop.limit_s,
            )
            for loop in service.loops
        }
        alive = all(loop.alive for loop in loops.values())
        response.status_code = 200 if alive else 503
        return Live(alive=alive, loops=loops)

    @router.get("/health/ready", response_model=Ready, responses={503: {"model": Ready}})
    async def ready(response: Response) -> Ready:
        """Check whether the pod can do work now. 503: it cannot, and the response says what it waits for."""
        why_not = service.ready()
        response.status_code = 503 if why_not else 200
        return Ready(ready=not why_not, phase=service.status.phase, why_not=why_not)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        """Return the pod's metrics in Prometheus text format (docs/operating.md)."""
        service.metrics.show(not service.ready(), service.loops, service.tracing.counts, service.activity)
        text = exposition(service.registry, run=service.config.run.name, pod=service.status.name)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


def _shown(host: str) -> str:
    """Return the address at which others reach this pod: GRPO_ADDRESS on a cluster, where its host name does not resolve."""
    address = host if host not in ("0.0.0.0", "::") else os.environ.get(ADDRESS_ENV) or socket.gethostname()
    return f"[{address}]" if ":" in address else address


class _Server(uvicorn.Server):
    """A server that leaves signal handling to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve(service: Service, tokens: ApiTokens) -> AsyncIterator[str]:
    """Serve the endpoints while the loops run. Yield the URL of the pod."""
    given = service.config.api
    host, port = given.host, given.port
    certificate = Certificate(given) if given.certificate_file else None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        section = "web" if service.kind == "web" else "api"
        raise ConfigError(
            f"{section}.port = {port}: cannot listen on {host} ({error.strerror}); choose another port, or 0 for a free one"
        ) from None
    app = make_app(service, tokens)
    tls = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate.files, strict=True)) if certificate else {}
    settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2, **tls)  # type: ignore[arg-type]
    settings.load()
    if certificate and settings.ssl:
        settings.ssl.sni_callback = certificate.present
    server = _Server(settings)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http{'s' if tls else ''}://{_shown(host)}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()
