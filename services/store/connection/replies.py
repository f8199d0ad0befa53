"""Error replies of Redis, as values. redis-py is not imported."""

from __future__ import annotations

ELSEWHERE = frozenset(["MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "READONLY", "NOREPLICAS"])
"""First words of errors that another node, or the same node a little later, would not return."""
LATER = ELSEWHERE | {"LOADING"}  # or a server that is reading its append-only file: wait as for a server that is starting


class ErrorReply(Exception):
    """An error reply of the server, as a value: its text without "ERR"."""

    @property
    def word(self) -> str:
        """Return the first word, which names the kind of error."""
        return str(self).partition(" ")[0]
