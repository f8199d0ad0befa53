"""A hub for tests: one model or dataset with its files, and the part of the hub's protocol that downloads need."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Hub:
    """A server of the model or dataset `name`.

    `commit` is its newest commit; `cut_after` is how many bytes of a large file a connection delivers before it is cut.
    """

    def __init__(self, name: str, files: dict[str, bytes], dataset: bool = False) -> None:
        self.name, self.files, self.commit = name, files, "a" * 40
        self._api, self._resolve = (
            (f"/api/datasets/{name}", f"/datasets/{name}") if dataset else (f"/api/models/{name}", f"/{name}")
        )
        self.status = 200
        """Status of every response; anything except 200 is an error."""
        self.cut_after: int | None = None
        self.hold = False
        """Whether a cut connection stays open instead of closing."""
        self.asked = list[str]()
        """Method, path and range of every request."""
        self._released = threading.Event()
        hub = self

        class Requests(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path
        self.asked.append(" ".join((request.command, path, request.headers.get("Range", ""))).strip())
        path = path.replace("/resolve/main/", f"/resolve/{self.commit}/")
        api, resolve = self._api, f"{self._resolve}/resolve/{self.commit}/"
        if self.status != 200:
            self._send(request, b"", self.status)
        elif path in (api, f"{api}/revision/main", f"{api}/revision/{self.commit}"):
            files = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            self._send(request, json.dumps({"id": self.name, "sha": self.commit, "siblings": files}).encode())
        elif path == f"{api}/tree/{self.commit}":
            files = [{"type": "file", "path": name, "size": len(data), "oid": _tag(data)} for name, data in self.files.items()]
            self._send(request, json.dumps(files).encode())
        elif path.startswith(resolve) and path.removeprefix(resolve) in self.files:
            self._send_file(request, self.files[path.removeprefix(resolve)])
        else:
            code = "RevisionNotFound" if path.startswith((f"{api}/", f"{self._resolve}/resolve/")) else "RepoNotFound"
            code = "EntryNotFound" if path.startswith(resolve) else code
            self._send(request, b"", 404, {"X-Error-Code": code})

    def _send(
        self, request: BaseHTTPRequestHandler, body: bytes, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)

    def _send_file(self, request: BaseHTTPRequestHandler, data: bytes) -> None:
        first = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        part = data[first:]
        ranged = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
        tags = {"ETag": f'"{_tag(data)}"', "X-Repo-Commit": self.commit, "Content-Length": str(len(part))}
        if request.command == "HEAD" or self.cut_after is None or len(part) <= self.cut_after:
            self._send(request, part, 206 if first else 200, tags | ranged)
            return
        self._send(request, part[: self.cut_after], 206 if first else 200, tags | ranged)
        request.wfile.flush()
        if self.hold:
            self._released.wait()
        request.close_connection = True


def _tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
