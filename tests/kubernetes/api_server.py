"""The one corner of a cluster's API that the chart's pods may call: `/scale` of a Deployment, over TLS, for one account."""

from __future__ import annotations

import json
import secrets
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class ApiServer:
    """Serves `replicas` of one Deployment; `calls` are the verbs that came, by path."""

    def __init__(self, folder: Path, address: str, namespace: str, deployment: str, replicas: int) -> None:
        """`folder` becomes what is mounted for a service account."""
        folder.mkdir(parents=True)
        self.replicas, self.version, self.calls, self.lock = replicas, 1, set[tuple[str, str]](), threading.Lock()
        self.path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{deployment}/scale"
        self.token = secrets.token_urlsafe(16)
        (folder / "token").write_text(self.token)
        (folder / "namespace").write_text(namespace)
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-keyout", str(folder.with_suffix(".key")), "-out", str(folder / "ca.crt"), "-subj", "/CN=kubernetes",
             "-addext", f"subjectAltName=IP:{address}"],
            check=True, capture_output=True,
        )  # fmt: skip
        self.server = ThreadingHTTPServer((address, 0), _handler(self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder.with_suffix(".key"))
        # The handshake is the handler's, in its thread: a client that breaks off must not hold up the others.
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.environ = {"KUBERNETES_SERVICE_HOST": address, "KUBERNETES_SERVICE_PORT": str(self.server.server_address[1])}

    def scale(self, replicas: int) -> None:
        """`kubectl scale`."""
        with self.lock:
            self.replicas, self.version = replicas, self.version + 1

    def answer(self, method: str, path: str, token: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
        """What the real one would say."""
        if token != f"Bearer {self.token}":
            return 401, {"message": "Unauthorized"}
        self.calls.add(({"GET": "get", "PATCH": "patch"}[method], path))
        if path != self.path:
            return 403, {"message": f"{path} is forbidden"}
        with self.lock:
            if method == "PATCH":
                if body["metadata"] != {"resourceVersion": str(self.version)}:
                    return 409, {"message": "the object has been modified"}
                self.replicas, self.version = body["spec"]["replicas"], self.version + 1  # type: ignore[index]
            spec = {"replicas": self.replicas} if self.replicas else {}
            return 200, {"kind": "Scale", "metadata": {"resourceVersion": str(self.version)}, "spec": spec}

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
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = _answer
        timeout = 30

        def log_message(self, *_: object) -> None:
            pass

    return Handler
