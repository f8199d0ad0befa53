"""Keeps the Redis server of a stopped run up while the run has readers: `python -m services.console.reading.keeper FOLDER`.

Guarantees: the server runs no longer than its readers, however they end, and ends with this process; a run that starts takes its
place. Any command that needs it starts it through shared_server.py.
Waits for: readers. Unblocked by: the last one leaving or ending, or SIGTERM from a run that starts; checked every `POLL_S`.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from services.console.errors import EXIT_OK, EXIT_REDIS
from services.console.lock import FolderLock, InUse
from services.console.reading.presence import Presence
from services.protocol.errors import StoreError
from services.runtime.process_tools import free_port
from services.runtime.redis_process import RedisProcess, on_a_free_port

POLL_S = 0.05


def keep(folder: Path, given: Mapping[str, Any]) -> int:
    """Serve until no reader is left. Return the exit code, at once if the folder is in use.

    `given`: the program of the server, its password and its options.
    """
    told = threading.Event()

    def end(_: int, __: FrameType | None) -> None:
        told.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for a reader in the same terminal
    presence = Presence(folder)
    try:
        with FolderLock(folder, readers=True) as lock:
            server = _started(folder / "redis", given)
            try:
                lock.note(server.port)
                while not told.wait(POLL_S) and not presence.take() and server.alive:
                    pass
            finally:
                server.stop()
    except InUse:
        return EXIT_OK
    except StoreError as error:
        print(error, file=sys.stderr)
        return EXIT_REDIS
    return EXIT_OK


def _started(folder: Path, given: Mapping[str, Any]) -> RedisProcess:
    def start() -> RedisProcess:
        server = RedisProcess(given["program"], folder, given["password"], free_port())
        server.launch(given["options"])
        return server

    return on_a_free_port(start)


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), json.load(sys.stdin)))
