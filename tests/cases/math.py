"""Cases of `math.jsonl`: a completion and a gold answer."""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from pathlib import Path
from typing import Any

from services.config.data import FileSource
from services.verifiers.base import Job
from services.verifiers.loaded import LoadedVerifier
from tests.support.verifiers import verifier


def attempt(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    """Return the score of the verifier `math`."""
    found = score(case["completion"], case["answer"])
    return found, found == case["right"]


def score(completion: str, answer: str) -> float:
    """Return the score that a worker gives a completion."""
    return _verifier().score(Job("main", [completion], answer), asyncio.run).scores[0]


@cache
def _verifier() -> LoadedVerifier:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    return LoadedVerifier(verifier("math"), FileSource(kind="jsonl", path="/unused"))
