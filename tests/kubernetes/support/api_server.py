"""The part of a cluster's API that the chart's pods may call, over TLS: `/scale` of three objects, and the scaler's ConfigMap."""

from __future__ import annotations

import json
import secrets
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from services.scaler.workload import KINDS


class ScaledObject:
    """The replicas of a Deployment or StatefulSet."""

    def __init__(self, path: str, replicas: int) -> None:
        self.path, self.replicas, self.version, self.uid = path, replicas, 1, secrets.token_hex(8)

    def set(self, replicas: int) -> None:
        self.replicas, self.version = replicas, self.version + 1


def mount_account(folder: Path, namespace: str, address: str) -> str:
    """Create the mount of a service account and, beside it, the key of the server at `address`; return the token."""
    folder.mkdir(parents=True)
    token = secrets.token_urlsafe(16)
    (folder / "token").write_text(token)
    (folder / "namespace").write_text(namespace)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(folder.with_suffix(".key")), "-out", str(folder / "ca.crt"), "-subj", "/CN=kubernetes",
         "-addext", f"subjectAltName=IP:{address}"],
        check=True, capture_output=True,
    )  # fmt: skip
    return token


class ApiServer:
    """Serves the replicas of generators, trainer and judge; `calls` holds the received verbs, by path."""

    def __init__(
        self, folder: Path, address: str, namespace: str, deployment: str, replicas: int = 1, trainer: str = "demo-trainer",
        kind: str = "StatefulSet", judge: str = "demo-judge", notes: str = "demo-scaler",
    ) -> None:  # fmt: skip
        """Start the server. `folder` becomes the mount of a service account; `kind` is the trainer's."""
        self.config_map, self.notes = f"/api/v1/namespaces/{namespace}/configmaps/{notes}", dict[str, str]()
        self.forbidden = False
        self.patches_left: int | None = None  # before it fails; None: it does not
        self.calls, self.lock = set[tuple[str, str]](), threading.Lock()
        root = f"/apis/apps/v1/namespaces/{namespace}"
        self.generators = ScaledObject(f"{root}/deployments/{deployment}/scale", replicas)
        group, version, plural = KINDS[kind]
        self.judge = ScaledObject(f"{root}/deployments/{judge}/scale", 1)
        sets = f"/apis/{group}/{version}/namespaces/{namespace}/{plural}"
        self.trainer = ScaledObject(f"{sets}/{trainer}/scale", 1)
        self.token = mount_account(folder, namespace, address)
        self.server = ThreadingHTTPServer((address, 0), _handler(self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder.with_suffix(".key"))
        # The handler does the TLS handshake in its own thread, so a client that hangs up does not block the others.
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.environ = {"KUBERNETES_SERVICE_HOST": address, "KUBERNETES_SERVICE_PORT": str(self.server.server_address[1])}

    @property
    def replicas(self) -> int:
        """Replicas of the Deployment."""
        return self.generators.replicas

    def scale(self, replicas: int) -> None:
        """Scale the Deployment as `kubectl scale` does."""
        with self.lock:
            self.generators.set(replicas)

    def recreate(self) -> None:
        """Delete the Deployment and create it again from its manifest, which does not set replicas."""
        with self.lock:
            self.generators = ScaledObject(self.generators.path, 1)

    def reinstall(self) -> None:
        """Delete all objects and create them again."""
        with self.lock:
            self.notes = {}
            self.generators, self.trainer, self.judge = (
                ScaledObject(each.path, 1) for each in (self.generators, self.trainer, self.judge)
            )

    def answer(self, method: str, path: str, token: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
        """Answer as the real server would."""
        scheme, _, given = token.partition(" ")
        if scheme.lower() != "bearer" or given.strip() != self.token:
            return 401, {"message": "Unauthorized"}
        self.calls.add(({"GET": "get", "PATCH": "patch"}[method], path.partition("?")[0]))
        path, _, query = path.partition("?")
        if method == "PATCH" and self.patches_left is not None:
            if self.patches_left == 0:
                return 500, {"message": "unavailable"}
            self.patches_left -= 1
        if path == self.config_map:
            with self.lock:
                if method == "PATCH":
                    merged = {**self.notes, **body["data"]}  # type: ignore[dict-item]
                    self.notes = {key: text for key, text in merged.items() if text is not None}
                return 200, {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "x"}, "data": dict(self.notes)}
        found = next((each for each in (self.generators, self.trainer, self.judge) if each.path == path), None)
        if found is None:
            return 403, {"message": f"{path} is forbidden"}
        with self.lock:
            if method == "PATCH":
                if body["metadata"] != {"resourceVersion": str(found.version)}:
                    return 409, {"message": "the object has been modified"}
                assert "fieldManager=grpo-scaler" in query
                found.set(body["spec"]["replicas"])  # type: ignore[index]
            spec = {"replicas": found.replicas} if found.replicas else {}
            meta = {"name": "x", "resourceVersion": str(found.version), "uid": found.uid}
            return 200, {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": meta, "spec": spec}

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()


def _handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else {}
            status, answer = server.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = _answer
        timeout = 30

        def log_message(self, *_: object) -> None:
            pass

    return Handler
