"""The command lines of `grpo`: options, help, and which verb does it. Imports nothing but typer, so that help is quick."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any


def finish(verb: Coroutine[Any, Any, int]) -> int:
    """Run a verb to its end; the exit code."""
    import asyncio

    return asyncio.run(verb)
