"""The commands of `grpo`: options, help, and the verb that each calls. Imports only typer, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any


def finish(verb: Coroutine[Any, Any, int]) -> int:
    """Run a verb to completion and return its exit code."""
    import asyncio

    return asyncio.run(verb)
