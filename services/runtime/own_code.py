"""Code of a user's own, by the name that the configuration gives it.

Imports nothing but the standard library: workers in other virtual environments use it too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any


class Unusable(Exception):
    """Code of a user's own cannot be loaded. The message says why."""


def imported(function: str) -> Any:
    """Return what `module:name` or `path.py:name` names. Raises `Unusable`, and what the import raises."""
    place, _, name = function.rpartition(":")
    found: Any = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise Unusable(f"function = {function!r}: {place} has no {part!r}")
        found = getattr(found, part)
    return found


@cache
def _from_file(path: Path) -> Any:
    """Import a file, under a name that hides no other module; modules beside it can be imported too."""
    name = f"own_{zlib.crc32(bytes(path))}_{path.stem}"
    described = importlib.util.spec_from_file_location(name, path)
    if described is None or described.loader is None or not path.is_file():
        raise Unusable(f"{path} is not a Python file that can be read")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(described)
    sys.modules[name] = module
    described.loader.exec_module(module)
    return module
