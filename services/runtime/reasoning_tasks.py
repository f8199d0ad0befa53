"""Imports reasoning-gym in half the time: without cellpylib, and so without matplotlib, until a task uses them.

Two of its hundred tasks, `game_of_life` and `game_of_life_halting`, compute with cellpylib, which imports matplotlib to draw.
The console, dataprep and every verifier worker import reasoning-gym, all while a run starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_DEFERRED = "cellpylib"


class _Deferred(ModuleType):
    """Stands in for a module until one of its attributes is used. importlib's own `LazyLoader` loads it at the next `import`."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_factory() -> Any:
    """Import `reasoning_gym.factory`, which makes tasks and lists them."""
    if _DEFERRED not in sys.modules:
        deferred = _Deferred(_DEFERRED)
        deferred.__spec__ = importlib.util.find_spec(_DEFERRED)
        sys.modules[_DEFERRED] = deferred
    importlib.import_module("reasoning_gym")  # adds the tasks: while another thread imports it, this waits
    return importlib.import_module("reasoning_gym.factory")
