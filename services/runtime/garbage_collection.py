"""Excludes objects that a process loads at its start from garbage collection.

A process that has loaded torch, transformers and vLLM holds some 600,000 objects. They stay for its whole life, and a full
collection that scans them stops its event loop for half a second or more.
"""

from __future__ import annotations

import gc


def freeze() -> None:
    """Exclude everything that is alive now from later collections. Call once, when a process has loaded what it needs."""
    gc.collect()  # garbage that is frozen would stay
    gc.freeze()


def thaw() -> None:
    """Include everything in collections again, at the end of a process: some finalizers depend on it."""
    gc.unfreeze()
    gc.collect()
