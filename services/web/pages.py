"""The page's own files: plain modules and style sheets, served from here alone.

Guarantees: a browser runs no script but these files, loads nothing from elsewhere, and makes no markup of strings (the
content security policy says so, trusted types included).
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

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
    "Cache-Control": "no-cache",  # a browser asks whether its copy is still the one
}


class Pages(StaticFiles):
    """The files, each with the headers above; `/` is the page."""

    def __init__(self) -> None:
        super().__init__(directory=STATIC, html=True)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, or the 404 that the app makes a problem of."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
