"""Import a module on first use: every pytest-xdist worker collects tests that only one of them runs."""

from __future__ import annotations

import importlib
from typing import Any


class Lazily:
    """Stands in for the classes of a module.

    pytest and its plugins look up other attributes of every name in a test file.
    """

    def __init__(self, name: str) -> None:
        """Name the module."""
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Import the module if necessary, and return its class of that name."""
        if not attribute[0].isupper():
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
