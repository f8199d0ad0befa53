"""Serves the page: its endpoints, and its files, which are plain modules and style sheets.

Guarantees: through the content security policy with trusted types, the browser runs only these scripts, loads nothing from other
servers, and never turns strings into markup.
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from services.runtime.service import Service
from services.web.api import console_router
from services.web.files import files_router
from services.web.samples import samples_router
from services.web.watch import Watch

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the browser checks whether its copy is current
}


def add_page(service: Service, watch: Watch) -> None:
    """Add the page, and the endpoints that only it has, to a service's app."""
    for router in (console_router(service, watch), samples_router(service), files_router(service)):
        service.app.include_router(router)
    service.app.router.routes.append(PageMount("/", Pages(), name="page"))


class PageMount(Mount):
    """Leaves what is below `/v1` to the endpoints, so that a wrong method is answered with the right ones."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the path is one of the page's."""
        return (Match.NONE, {}) if scope.get("path", "").startswith("/v1/") else super().matches(scope)


class Pages(StaticFiles):
    """Serves the files with the headers above; `/` is the page."""

    def __init__(self) -> None:
        super().__init__(directory=STATIC, html=True)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or a 404 that the app turns into a `Problem`."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
