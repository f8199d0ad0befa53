"""The reference of the REST endpoints, from the OpenAPI documents of the services. No service is started."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from documentation.configuration import cell
from services.config.load import validate
from services.generator.api import add_routes as add_generator
from services.http.api import make_app
from services.http.credentials import ApiTokens
from services.http.endpoints import add_checkpoint_routes as add_checkpoints
from services.http.endpoints import add_run_routes as add_run
from services.protocol.messages import PodStatus
from services.runtime.service import Service
from services.web.serving import add_console

INTRODUCTION = """# REST

Every service serves these endpoints on its own address, the `url` of its pod in `grpo status --json`. Send the header
`Authorization: Bearer TOKEN`: endpoints marked *operate* need the token in `runs/NAME/api-token`, those marked *read* the one in
`runs/NAME/api-read-token` or the other. Every call is idempotent and may be repeated. An error is a JSON object with `status`,
`title` and `detail` (RFC 9457). Parameters are those of the query; the body is JSON, with the header
`content-type: application/json`. Those in bold are required; unknown ones are refused by endpoints marked *operate*.
`/openapi.json` has all types, and `/docs` renders them in a browser that can reach the internet.
[Controlling a run](../control.md) explains what the requests do.
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
        rows = [f"| `{one.method} {one.path}` | {one.scope} | {one.takes} | {cell(one.what)} |" for one in operations]
        head = ["| endpoint | scope | parameters; body | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {TITLES[kind]}\n", *head, *rows, ""]))
    return "\n".join(parts)


class Endpoint(NamedTuple):
    """A row of the page."""

    method: str
    path: str
    scope: str
    takes: str
    what: str


def of(kind: str) -> list[Endpoint]:
    """Return the endpoints of a kind of service, by path."""
    found, document = list[Endpoint](), openapi(kind)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            scope = "" if "security" not in operation else "read" if method == "get" else "operate"
            what = operation.get("description", "").split("\n\n")[0]
            found.append(Endpoint(method.upper(), path, scope, _takes(operation, document), what))
    return sorted(found, key=lambda each: (each.path, each.method))


def _takes(operation: dict[str, Any], document: dict[str, Any]) -> str:
    """Return the parameters and the fields of the body of an endpoint, required ones in bold."""
    given = {each["name"]: each["required"] for each in operation.get("parameters", []) if each["in"] == "query"}
    parts = [", ".join(_marked(name, needed) for name, needed in given.items())]
    if body := operation.get("requestBody"):
        schema = body["content"]["application/json"]["schema"]
        name = next(each["$ref"] for each in [schema, *schema.get("anyOf", [])] if "$ref" in each).rpartition("/")[2]
        fields = document["components"]["schemas"][name]
        needed = fields.get("required", [])
        parts.append("body: " + ", ".join(_marked(field, field in needed) for field in fields["properties"]))
    return "; ".join(part for part in parts if part)


def _marked(name: str, needed: bool) -> str:
    return f"**`{name}`**" if needed else f"`{name}`"


def openapi(kind: str) -> dict[str, Any]:
    """Return the OpenAPI document of a kind of service."""
    sources = [{"kind": "jsonl", "path": "prompts.jsonl"}]
    config = validate({"model": {"path": "m"}, "data": {"sources": sources}, "verifiers": [{"kind": "math"}]}, "documentation")
    status = PodStatus(kind, kind, "", "", 0, "", "", -1, 0, {})
    service = Service(kind, config, cast(Any, None), status)
    service.app = make_app(service, ApiTokens("operate", "read"))
    ADD[kind](service)
    return service.app.openapi()
