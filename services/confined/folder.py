"""The folder of a rollout's code: its size, and its contents as JSON, whatever the code has done to it.

Guarantees: nothing outside the folder is read: no symbolic link is followed.
"""

from __future__ import annotations

import base64
import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

FOLDER_BYTES, FOLDER_ENTRIES = 64 << 20, 10_000
"""Maximum size of its contents."""
DEPTH = 50
"""Maximum depth of nested folders."""
KEPT_BYTES = 256 << 10
"""Maximum size of contents that go into a rollout's records: with more, another pod cannot continue it."""


def over(folder: Path, most_bytes: int, most_entries: int) -> bool:
    """Return whether a folder has more bytes or entries; code may run in it meanwhile.

    Also return True if nobody can tell: folders in it are nested too deeply, have too long a path, or forbid reading.
    """
    size = count = 0
    pending = [(str(folder), 0)]
    while pending:
        place, depth = pending.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    count += 1
                    if count > most_entries or depth > DEPTH:
                        return True
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            pending.append((entry.path, depth + 1))
        except (FileNotFoundError, NotADirectoryError):  # deleted or replaced meanwhile
            continue
        except OSError:
            return True
    return size > most_bytes


def packed(folder: Path) -> dict[str, str] | None:
    """Return the files by their paths, in base64; None if they are too large, cannot be read, or are not all plain files."""
    try:
        return _packed(folder)
    except OSError:  # its mode, or that of a folder in it, forbids reading
        return None


def _packed(folder: Path) -> dict[str, str] | None:
    found: dict[str, str] = {}
    size = 0
    for path, entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            continue
        known = entry.stat(follow_symlinks=False)
        size += known.st_size + len(path)
        if not stat.S_ISREG(known.st_mode) or size > KEPT_BYTES:
            return None
        if not path.isprintable():  # such as a name that is not UTF-8, which no record can hold
            return None
        found[path] = base64.b85encode((folder / path).read_bytes()).decode()
    return found


def unpack(folder: Path, files: dict[str, str]) -> None:
    """Write the files that `packed` returned. Raises ValueError for a path that leaves the folder."""
    for path, data in files.items():
        if not inside(path):
            raise ValueError(f"the path {path!r} leaves the folder")
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(base64.b85decode(data))


def inside(path: str) -> bool:
    """Return whether a relative path stays in its folder."""
    return not path.startswith("/") and ".." not in path.split("/")


def _entries(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    for entry in sorted(os.scandir(folder), key=lambda each: each.name):
        yield str(Path(entry.path).relative_to(folder)), entry
        if entry.is_dir(follow_symlinks=False):
            for path, inner in _entries(Path(entry.path)):
                yield f"{entry.name}/{path}", inner
