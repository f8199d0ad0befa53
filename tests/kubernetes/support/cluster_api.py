"""The part of a cluster's API that Helm uses, so that the real Helm installs, upgrades, rolls back and uninstalls the chart.

Objects are kept in memory and applied by the rules of field_managers.py. Fields that are immutable in a cluster are immutable
here. No pod ever starts: the Job or Pod of a hook ends as soon as it is created, with the outcome that `fails` sets.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.kubernetes.support.chart import Object
from tests.kubernetes.support.field_managers import REPLICAS, FieldConflict, LiveObject

CLUSTER_WIDE = ("Namespace",)
SCALED = ("Deployment", "StatefulSet", "LeaderWorkerSet")
SCHEMAS, PROTOBUF = "/openapi/v2", "application/octet-stream"
"""Schemas are requested as protobuf; empty bytes are a document without schemas, so nothing is validated."""
IMMUTABLE = {
    "Job": (("spec", "template"),), "Deployment": (("spec", "selector"),),
    "StatefulSet": (("spec", "selector"), ("spec", "serviceName"), ("spec", "volumeClaimTemplates")),
    "PersistentVolumeClaim": (("spec",),),
}  # fmt: skip
ENDED: dict[tuple[str, bool], Object] = {
    ("Job", True): {"failed": 1, "conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]},
    ("Job", False): {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]},
    ("Pod", True): {"phase": "Failed"},
    ("Pod", False): {"phase": "Succeeded", "conditions": [{"type": "Ready", "status": "False", "reason": "PodCompleted"}]},
}
"""(kind, whether it fails) -> status."""


class ApiError(Exception):
    """An error response."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code, "message": message,
            "details": {"causes": [{"reason": "FieldManagerConflict", "message": message}] if reason == "Conflict" else []},
        }  # fmt: skip


class Held:
    """An object of the cluster."""

    def __init__(self, version: str, kind: str) -> None:
        self.head = {"apiVersion": version, "kind": kind}
        self.kind, self.live, self.uid, self.revision = kind, LiveObject(), str(uuid.uuid4()), 0
        self.status: Object = {}

    def tree(self) -> Object:
        """Return the object as the API does."""
        found: Object = {}
        for path, value in self.live.fields.items():
            if path == REPLICAS and self.kind not in SCALED:
                continue
            node = found
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = value
        meta = found.setdefault("metadata", {})
        meta |= {"uid": self.uid, "resourceVersion": str(self.revision), "creationTimestamp": "2026-01-01T00:00:00Z"}
        meta["generation"] = 1
        return {**found, **self.head, "status": {"observedGeneration": 1, **self.status}}

    def has_label(self, selector: str) -> bool:
        """Return whether a label selector matches it."""
        labels = self.tree()["metadata"].get("labels", {})
        wanted = (term.replace("==", "=").split("=") for term in selector.split(",") if term)
        return all(labels.get(key) == value for key, value in wanted)


class ClusterApi:
    """Serves the kinds in `known`, and starts with only the namespace."""

    def __init__(self, known: list[Object], namespace: str = "ml") -> None:
        self.kinds: dict[str, dict[str, str]] = {}
        for found in [*known, *({"apiVersion": "v1", "kind": kind} for kind in ("Namespace", "Secret", "Pod", "ServiceAccount"))]:
            self.kinds.setdefault(found["apiVersion"], {})[found["kind"]] = plural(found["kind"])
        self.held: dict[str, Held] = {}
        self.fails: Callable[[str], bool] = lambda name: False
        self.revisions, self.changed = itertools.count(1), threading.Condition()
        self.events: list[tuple[str, str, Object]] = []  # path of the kind, type, object
        self.place({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def kubeconfig(self) -> str:
        """Return the kubeconfig for this API."""
        return yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "here", "users": [{"name": "me", "user": {}}],
            "clusters": [{"name": "here", "cluster": {"server": self.address}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "ml"}}],
        })  # fmt: skip

    def names(self, *but: str) -> set[tuple[str, str]]:
        """Return kind and name of every object, except those of some kinds."""
        found = (held.tree() for held in self.held.values() if held.kind not in ("Namespace", *but))
        return {(tree["kind"], tree["metadata"]["name"]) for tree in found}

    def named(self, kind: str, name: str) -> Held:
        """Return the object of this kind and name."""
        (held,) = (held for path, held in self.held.items() if held.kind == kind and path.endswith(f"/{name}"))
        return held

    def place(self, manifest: Object) -> None:
        """Create an object outside any release."""
        version, meta = manifest["apiVersion"], manifest["metadata"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        inside = f"/namespaces/{meta['namespace']}" if manifest["kind"] not in CLUSTER_WIDE else ""
        self.put(f"{root}{inside}/{self.kinds[version][manifest['kind']]}", manifest, "test")

    def put(self, folder: str, manifest: Object, manager: str, force: bool = False) -> Object:
        """Apply an object. Raises `ApiError`."""
        path = f"{folder}/{manifest['metadata']['name']}"
        with self.changed:
            held = self.held.get(path)
            known = held is not None
            held = held or Held(manifest["apiVersion"], manifest["kind"])
            meta = {
                key: value
                for key, value in manifest["metadata"].items()
                if key not in ("uid", "resourceVersion", "managedFields")
            }
            wanted = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "status", "metadata")}
            before = held.tree()
            try:
                held.live.apply(manager, {**wanted, "metadata": meta}, force)
            except FieldConflict as conflict:
                raise ApiError(409, "Conflict", f"Apply failed with 1 conflict: {conflict}") from conflict
            for field in IMMUTABLE.get(held.kind, ()) if known else ():
                if _at(before, field) != _at(held.tree(), field):
                    raise ApiError(422, "Invalid", f"{held.kind} {path}: {'.'.join(field)}: field is immutable")
            if not known and held.kind in ("Job", "Pod"):
                held.status = ENDED[held.kind, self.fails(manifest["metadata"]["name"])]
            self.held[path] = held
            if not known or held.tree() != before:
                self._tell("MODIFIED" if known else "ADDED", path, held)
            return held.tree()

    def delete(self, path: str) -> Object:
        """Delete an object. Raises `ApiError`."""
        with self.changed:
            held = self.get(path)
            del self.held[path]
            self._tell("DELETED", path, held)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 200}

    def get(self, path: str) -> Held:
        """Return the object at a path. Raises `ApiError`."""
        if path not in self.held:
            raise ApiError(404, "NotFound", f"{path} not found")
        return self.held[path]

    def list(self, folder: str, query: Mapping[str, str]) -> Object:
        """Return the objects in a folder."""
        version, kind = self._kind(folder)
        return {
            "kind": f"{kind}List", "apiVersion": version, "metadata": {"resourceVersion": str(next(self.revisions))},
            "items": [held.tree() for path, held in sorted(self.held.items()) if self._chosen(path, held, folder, query)],
        }  # fmt: skip

    def watch(self, folder: str, query: Mapping[str, str]) -> Iterator[Object]:
        """Yield the events of a folder since a revision, as they arrive; end after a second without any."""
        since, at = int(query.get("resourceVersion") or 0), 0
        while True:
            with self.changed:
                if at == len(self.events) and not self.changed.wait(1.0):
                    return
                new, at = self.events[at:], len(self.events)
            for path, what, tree in new:
                if path.rpartition("/")[0] == folder and int(tree["metadata"]["resourceVersion"]) > since:
                    yield {"type": what, "object": tree}

    def discover(self, path: str) -> Object:
        """Return the available versions and kinds. Raises `ApiError`."""
        if path == "/version":
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version not in self.kinds:
            raise ApiError(404, "NotFound", f"{path} not found")
        resources = [
            {
                "name": name, "singularName": kind.lower(), "namespaced": kind not in CLUSTER_WIDE, "kind": kind,
                "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
            }
            for kind, name in self.kinds[version].items()
        ]  # fmt: skip
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}

    def is_folder(self, path: str) -> bool:
        """Return whether a path is that of all objects of a kind, rather than of one of them."""
        return (
            any(path.endswith(f"/{name}") for kinds in self.kinds.values() for name in kinds.values()) and path not in self.held
        )

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()

    def _chosen(self, path: str, held: Held, folder: str, query: Mapping[str, str]) -> bool:
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        inside = path.rpartition("/")[0] == folder and name in ("", path.rpartition("/")[2])
        return inside and held.has_label(query.get("labelSelector", ""))

    def _kind(self, folder: str) -> tuple[str, str]:
        name = folder.rpartition("/")[2]
        return next(
            (version, kind)
            for version, kinds in self.kinds.items()
            for kind, each in kinds.items()
            if each == name and folder.startswith(f"/apis/{version}/" if "/" in version else f"/api/{version}/")
        )

    def _tell(self, what: str, path: str, held: Held) -> None:
        held.revision = next(self.revisions)
        self.events.append((path, what, held.tree()))
        self.changed.notify_all()

    def _groups(self) -> list[object]:
        versions = [version for version in self.kinds if "/" in version]
        return [
            {"name": version.split("/")[0], "versions": [stated], "preferredVersion": stated}
            for version in versions
            for stated in [{"groupVersion": version, "version": version.split("/")[1]}]
        ]


def plural(kind: str) -> str:
    """Return the plural name of a kind in the API."""
    lower = kind.lower()
    if lower.endswith(("s", "x")):
        return f"{lower}es"
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}s"


def _at(tree: Object, path: tuple[str, ...]) -> Any:
    node: Any = tree
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _handler(api: ClusterApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(url.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                if query.get("watch") in ("1", "true"):
                    self._watch(url.path, query)
                    return
                self._send(200, None if url.path == SCHEMAS else self._done(url.path, query, body))
            except ApiError as error:
                self._send(error.code, error.status)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

        def _done(self, path: str, query: Mapping[str, str], body: bytes) -> Object:
            if self.command == "GET" and path in api.held:
                return api.get(path).tree()
            if self.command == "GET":
                return api.list(path, query) if api.is_folder(path) else api.discover(path)
            if self.command == "DELETE":
                return api.delete(path)
            sent, manager = yaml.safe_load(body), query.get("fieldManager", "helm")
            if self.command == "POST":
                if f"{path}/{sent['metadata']['name']}" in api.held:
                    raise ApiError(409, "AlreadyExists", f"{path}/{sent['metadata']['name']} already exists")
                return api.put(path, sent, manager)
            folder, _, name = path.rpartition("/")
            if self.command == "PATCH" and "apply-patch" not in self.headers["Content-Type"]:
                sent = _merged(api.get(path).tree(), sent)
            sent["metadata"].setdefault("name", name)
            force = query.get("force") == "true" or self.command == "PUT"
            return api.put(folder, sent, manager, force)

        def _watch(self, folder: str, query: Mapping[str, str]) -> None:
            if "sendInitialEvents" in query:
                raise ApiError(422, "Invalid", "sendInitialEvents is not known here")
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the watcher hung up
                for event in api.watch(folder, query):
                    data = json.dumps(event).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

        def _send(self, code: int, answer: Object | None) -> None:
            data = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json" if answer else PROTOBUF)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _merged(tree: Object, patch: Object) -> Object:
    """Return an object after a merge patch."""
    found = dict(tree)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = _merged(found[key], value)
        else:
            found[key] = value
    return found
