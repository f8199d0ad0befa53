"""A cluster's API as far as `helm upgrade --dry-run=server` asks it: which kinds there are, and what a chart looks up."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.kubernetes.chart import Object

CLUSTER_WIDE = ("Namespace",)
SCHEMAS, PROTOBUF = "/openapi/v2", "application/octet-stream"
"""Schemas are asked for as protobuf; no bytes are a document without any, so that nothing is validated here."""


class LookupServer:
    """Serves `objects`, and that there are the kinds of `known`; every other object is not found. Nothing can be changed."""

    def __init__(self, known: list[Object], objects: list[Object]) -> None:
        self.kinds: dict[str, dict[str, str]] = {}
        for found in [*known, *({"apiVersion": "v1", "kind": kind} for kind in ("Namespace", "ServiceAccount"))]:
            self.kinds.setdefault(found["apiVersion"], {})[found["kind"]] = plural(found["kind"])
        self.objects = {path_of(found, self.kinds): found for found in objects}
        self.asked: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, path: str) -> tuple[int, Mapping[str, object]]:
        """Status and body of a GET."""
        self.asked.append(path)
        if path == "/version":
            return 200, {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in self.kinds:
            resources = [
                {
                    "name": name,
                    "singularName": kind.lower(),
                    "namespaced": kind not in CLUSTER_WIDE,
                    "kind": kind,
                    "verbs": ["get", "list"],
                }
                for kind, name in self.kinds[version].items()
            ]
            return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        if path in self.objects:
            return 200, self.objects[path]
        for kind in ("Secret", "ServiceAccount"):
            if path.endswith(f"/{plural(kind)}"):
                return 200, {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {}, "items": []}
        return 404, {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": "NotFound",
            "code": 404,
            "message": path,
        }

    def _groups(self) -> list[object]:
        versions = [version for version in self.kinds if "/" in version]
        return [
            {"name": version.split("/")[0], "versions": [stated], "preferredVersion": stated}
            for version in versions
            for stated in [{"groupVersion": version, "version": version.split("/")[1]}]
        ]

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()


def plural(kind: str) -> str:
    """What the API calls many of a kind."""
    lower = kind.lower()
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}s"


def path_of(found: Object, kinds: Mapping[str, Mapping[str, str]]) -> str:
    """Where an object is."""
    version, meta = found["apiVersion"], found["metadata"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    if found["kind"] in CLUSTER_WIDE:
        return f"{root}/{kinds[version][found['kind']]}/{meta['name']}"
    return f"{root}/namespaces/{meta['namespace']}/{kinds[version][found['kind']]}/{meta['name']}"


def _handler(server: LookupServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            status, answer = (200, None) if path == SCHEMAS else server.answer(path)
            data = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if answer else PROTOBUF)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
