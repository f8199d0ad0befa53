"""Keeps the Redis server of a stopped run up while anybody reads the run: `python -m services.console.reading.keeper FOLDER`.

Guarantees: the server runs no longer than its readers, however they end, and ends with this process; a run that starts takes
its place. It is started by shared_server.py, which any command does that needs it.
Waits for: readers. Unblocked by: the last one leaving or ending, or SIGTERM from a run that starts; looked at every `POLL_S`.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from services.console.errors import EXIT_OK, EXIT_REDIS
from services.console.local.lock import FolderLock, InUse
from services.console.local.redis_server import start_server
from services.console.reading.presence import Presence
from services.protocol.errors import StoreError

POLL_S = 0.05


def keep(folder: Path, appendfsync: str) -> int:
    """Serve until nobody reads. Return the exit code, at once if the folder is in use."""
    told = threading.Event()

    def end(_: int, __: FrameType | None) -> None:
        told.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for a reader in the same terminal
    presence = Presence(folder)
    try:
        with FolderLock(folder, readers=True) as lock:
            server = start_server(folder / "redis", appendfsync, folder.name)
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


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), sys.argv[2]))
