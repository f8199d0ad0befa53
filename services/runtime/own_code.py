"""Loads a user's own code by the name that the configuration gives it.

Imports nothing but the standard library: workers in other virtual environments use it too.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).resolve().parents[2] / "services")
_PACKAGES = "site-packages"
_LIBRARIES = tuple({str(Path(traceback.__file__).parent), *(path for path in sys.path if path.endswith(_PACKAGES))})
"""Folders of Python's libraries and of installed packages, which the user's code calls but does not consist of."""


class Unusable(Exception):
    """A user's own code cannot be loaded. The message says why."""


def imported(function: str) -> Any:
    """Return the object that `module:name` or `path.py:name` names. Raises `Unusable`, and whatever the import raises."""
    place, _, name = function.rpartition(":")
    found: Any = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [each for each in vars(found) if not each.startswith("_")], 1)
            meant = f": did you mean {near[0]!r}?" if near else ""
            raise Unusable(f"{Path(place).name if place.endswith('.py') else place} has no {part!r}{meant}")
        found = getattr(found, part)
    return found


@contextmanager
def reported_as(made: Callable[[str], Exception]) -> Iterator[None]:
    """Raise the exception that is `made` of the first line of whatever fails inside the block."""
    try:
        yield
    except Exception as error:  # code that is not ours may raise anything, also while it is imported
        raise made(described(error).splitlines()[0]) from error


def described(error: BaseException) -> str:
    """Return type and text of what was raised."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of its own __str__
        return type(error).__name__


def reason_of(error: BaseException) -> str:
    """Return what was raised, in which line of the user's code, and for a missing package how to install it."""
    text = described(error)[:500]
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith((_OURS, "<frozen"))]
    own = [one for one in frames if not one.filename.startswith(_LIBRARIES)] or [
        one for one in frames if _PACKAGES in one.filename
    ]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{text}{place}{_remedy(error)}"


def _remedy(error: BaseException) -> str:
    """Return what to do about code that cannot be imported; only the file that the configuration names is copied for a run."""
    if isinstance(error, ModuleNotFoundError):
        return f": install it for {sys.executable}, or put it into the folder in which you start grpo"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return ": name it as package.module:name, with the package in the folder in which you start grpo"
    return ""


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
