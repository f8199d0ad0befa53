"""The garbage collector and what a process loads at its start.

A process that has loaded torch, transformers and vLLM holds some 600,000 objects. They stay for its whole life, and a full
collection that looks at them all stops its event loop for half a second and more.
"""

from __future__ import annotations

import gc


def freeze() -> None:
    """Leave everything that lives now out of collections to come. To be called once, when a process has loaded what it needs."""
    gc.collect()  # garbage that is frozen would stay
    gc.freeze()


def thaw() -> None:
    """Collect everything again, at the end of a process: finalizers that depend on it."""
    gc.unfreeze()
    gc.collect()
