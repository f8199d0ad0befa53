"""Keeps pyarrow from importing numpy, which takes twice as long as the rest of a command that reads the sample log."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, cast


@contextlib.contextmanager
def without_numpy() -> Iterator[None]:
    """Hide numpy from imports inside the block, unless it is already imported. Use pyarrow inside: parts of it are imported on
    first use.

    It works without numpy, except for conversions to and from arrays: none may follow in this process.
    """
    if "numpy" in sys.modules:
        yield
        return
    modules = cast("dict[str, Any]", sys.modules)
    modules["numpy"] = None  # how the import system marks a module that cannot be found
    try:
        yield
    finally:
        del modules["numpy"]
