"""Where each key of a configuration is set: a line of the file, an environment variable, or the command line.

Guarantees: a key that is set somewhere has a place; a key within an inline table or a list has the place of the table or list.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_NAME = r"""(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)"""
_KEY = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")
_TABLE = re.compile(rf"\s*(\[\[?)\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*\]\]?\s*(?:#.*)?$")
_TOKEN = re.compile(r'"""|\'\'\'|"(?:\\.|[^"\\])*"|\'[^\']*\'|#.*|[\[\]{}]')
_DOTTED = re.compile(r"[a-z_]+(?:\.[A-Za-z0-9_]+)+|[a-z_]+(?= = )")
"""What a message calls keys: `run.steps`, or the name of a section before an equals sign."""

COMMAND_LINE = "command line"


class KeyPlaces:
    """The places of the keys that one configuration sets."""

    def __init__(self, file: str, text: str = "") -> None:
        self.file = file
        self._lines = dict(_keys(text))
        self._set: dict[str, str] = {}

    def put(self, key: str, place: str) -> None:
        """Note that a key is set at a place other than the file; the last one counts, also for whatever the key holds."""
        for places in (self._lines, self._set):
            for replaced in [held for held in places if held.startswith(f"{key}.")]:
                del places[replaced]
        self._set[key] = place

    def of(self, key: str) -> str:
        """Return where a key is set, or the table or list that holds it, or else a key below it; "" if it has its default."""
        for held in _upwards(key):
            if held in self._set:
                return self._set[held]
            if held in self._lines:
                return f"{self.file}:{self._lines[held]}"
        return next((place for held, place in self._set.items() if held.startswith(f"{key}.")), "")

    @staticmethod
    def named(message: str) -> list[str]:
        """Return the keys that a message names."""
        return _DOTTED.findall(message)

    def told(self, message: str) -> str:
        """Return a message about keys after the place where one of them is set, or after the file's name."""
        return f"{self.found(message) or self.file}: {message}"

    def found(self, message: str) -> str:
        """Return the place of the first set key that a message names, or else of what holds one; "" if it names none."""
        keys = self.named(message)
        keys.sort(key=lambda key: key not in self._set and key not in self._lines)
        return next((place for key in keys if (place := self.of(key))), "")


def _upwards(key: str) -> Iterator[str]:
    """Return a key and the tables and lists that hold it, from the innermost on."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _keys(text: str) -> Iterator[tuple[str, int]]:
    """Return the keys and tables of a TOML text with their lines, from 1; entries of lists of tables are numbered."""
    prefix, counts = "", dict[str, int]()
    depth, closes = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not depth and not closes:
            if table := _TABLE.match(line):
                prefix = _place(_joined(table[2]), counts, listed=table[1] == "[[")
                yield prefix, number
                continue
            if key := _KEY.match(line):
                yield f"{prefix}.{_joined(key[1])}".lstrip("."), number
                line = line[key.end() :]
        depth, closes = _open(line, depth, closes)


def _place(name: str, counts: dict[str, int], listed: bool) -> str:
    """Return the path of a table: below a list of tables it belongs to the last entry."""
    path = ""
    parts = name.split(".")
    for at, part in enumerate(parts, start=1):
        path = f"{path}.{part}".lstrip(".")
        if listed and at == len(parts):
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = f"{path}.{counts[path]}"
    return path


def _open(line: str, depth: int, closes: str) -> tuple[int, str]:
    """Return how many brackets are open after a line, and which multi-line string."""
    start = 0
    while True:
        if closes:
            end = line.find(closes, start)
            if end < 0:
                return depth, closes
            start, closes = end + len(closes), ""
        token = _TOKEN.search(line, start)
        if token is None:
            return depth, ""
        start = token.end()
        if token[0] in ('"""', "'''"):
            closes = token[0]
        elif token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1


def _joined(dotted: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in dotted.split("."))
