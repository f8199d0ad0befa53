"""Excludes objects that a process loads at startup from garbage collection, and collects nothing during imports.

A process that has loaded torch, transformers and vLLM holds some 600,000 objects. They stay for its whole life, and a full
collection that scans them stops its event loop for half a second or more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing inside this block, and exclude what it has loaded from later collections.

    Imports make a million objects and hardly any garbage: looking for it takes a quarter of the processor time of importing
    torch, DeepSpeed or vLLM, and another half second in each process that is forked afterwards.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def freeze() -> None:
    """Exclude everything that is alive now from later collections. Call once, after a process has finished loading."""
    gc.collect()  # garbage that is frozen would stay
    gc.freeze()


def thaw() -> None:
    """Include everything in collections again, at the end of a process: some finalizers depend on it."""
    gc.unfreeze()
    gc.collect()
