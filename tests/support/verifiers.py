"""Verifiers as entries of a configuration, and their bare scores."""

from __future__ import annotations

from typing import Any

from services.config.verifiers import VERIFIER, VerifierConfig
from services.verifiers.base import Job
from services.verifiers.pool import VerifierPool


def verifier(kind: str, **settings: Any) -> VerifierConfig:
    """Return an entry of `verifiers`."""
    return VERIFIER.validate_python({"kind": kind, **settings})


async def scored(pool: VerifierPool, completions: list[str], answer: str, source: str = "main") -> dict[str, list[float]]:
    """Return the scores of each verifier of a pool."""
    return {name: verdict.scores for name, verdict in (await pool.score(Job(source, completions, answer))).items()}
