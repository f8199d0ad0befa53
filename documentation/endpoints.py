"""The reference of the REST endpoints, from the OpenAPI documents of the services. No service is started."""

from __future__ import annotations

from typing import Any, cast

from documentation.configuration import cell
from services.config.load import validate
from services.generator.api import add_routes as add_generator
from services.http.api import make_app
from services.http.credentials import ApiTokens
from services.http.endpoints.checkpoints import add_routes as add_checkpoints
from services.http.endpoints.run import add_routes as add_run
from services.protocol.messages import PodStatus
from services.runtime.service import Service
from services.web.serving import add_console

INTRODUCTION = """# REST

Every service serves these endpoints on its own address, which `grpo status` prints. Send `Authorization: Bearer TOKEN`: endpoints
marked *operate* need the token in `runs/NAME/api-token`, those marked *read* the one in `runs/NAME/api-read-token` or the other.
Every call is idempotent and may be repeated. An error is a JSON object with `status`, `title` and `detail` (RFC 9457).
`/openapi.json` has all types, and `/docs` renders them. [Controlling a run](../control.md) explains what the requests do.
"""
COMMON = "tracker"
ADD = {
    "tracker": lambda service: None,
    "dataprep": add_run,
    "generator": lambda service: add_generator(service, cast(Any, None)),
    "trainer": add_checkpoints,
    "web": add_console,
}
TITLES = {"tracker": "Every service", "dataprep": "Dataprep and the web console", "trainer": "Trainer and the web console",
          "generator": "Generators", "web": "Web console"}  # fmt: skip


def page() -> str:
    """Return the page."""
    parts, known = [INTRODUCTION], set[tuple[str, str]]()
    for kind in ADD:
        operations = [each for each in of(kind) if each[:2] not in known]
        known |= {each[:2] for each in operations}
        rows = [f"| `{method} {path}` | {scope} | {cell(what)} |" for method, path, scope, what in operations]
        parts.append("\n".join([f"## {TITLES[kind]}\n", "| endpoint | scope | meaning |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def of(kind: str) -> list[tuple[str, str, str, str]]:
    """Return method, path, scope and description of each endpoint of a kind of service."""
    found = []
    for path, methods in openapi(kind)["paths"].items():
        for method, operation in methods.items():
            scope = "" if "security" not in operation else "read" if method == "get" else "operate"
            found.append((method.upper(), path, scope, operation.get("description", "").split("\n\n")[0]))
    return sorted(found, key=lambda each: (each[1], each[0]))


def openapi(kind: str) -> dict[str, Any]:
    """Return the OpenAPI document of a kind of service."""
    sources = [{"kind": "jsonl", "path": "prompts.jsonl"}]
    config = validate({"model": {"path": "m"}, "data": {"sources": sources}, "verifiers": [{"kind": "math"}]}, "documentation")
    status = PodStatus(kind, kind, "", "", 0, "", "", -1, 0, {})
    service = Service(kind, config, cast(Any, None), status)
    service.app = make_app(service, ApiTokens("operate", "read"))
    ADD[kind](service)
    return service.app.openapi()
