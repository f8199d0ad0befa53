"""The request to start a process: the arguments of `subprocess.Popen` and its open files."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass

LIMIT_BYTES = 1 << 17
LIMIT_FILES = 64


@dataclass(frozen=True)
class Request:
    """`files` are the descriptors under which the files sent along are to be open: 0, 1, 2 and `pass_fds`."""

    argv: tuple[str, ...]
    environ: dict[str, str]
    cwd: str
    umask: int
    files: tuple[int, ...]
    session: bool
    group: int  # the process group to join, 0 for a new one
    before: Callable[[], None] | None  # subprocess' `preexec_fn`


def send(connection: socket.socket, request: Request, files: list[int]) -> None:
    """Send a request and the files it names."""
    socket.send_fds(connection, [pickle.dumps(request)], files)


def receive(connection: socket.socket) -> tuple[Request, list[int]] | None:
    """Return the next request and its files, or None when no client is left."""
    message, files, _, _ = socket.recv_fds(connection, LIMIT_BYTES, LIMIT_FILES)
    return (pickle.loads(message), files) if message else None
