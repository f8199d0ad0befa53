"""The interface of verifiers, their names, and how their scores combine into a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.config.data import VerifierConfig, verifier_names


class VerifierFailure(Exception):
    """A verifier raised, exceeded its time limit, or its process died. This is not a score of zero."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Verifier(Protocol):
    """Judges completions. It lives in a worker process, which may be killed during a call."""

    def score(self, completion: str, answer: str) -> float:
        """Return the score in 0..1 of one completion against the ticket's answer. May raise any exception."""
        ...


def combine(scores: Mapping[str, Sequence[float]], verifiers: Sequence[VerifierConfig]) -> list[float]:
    """Return the rewards [n]: the weighted sum of the scores in `scores`."""
    columns = [[verifier.weight * score for score in scores[name]] for name, verifier in named(verifiers) if name in scores]
    return [sum(row) for row in zip(*columns, strict=True)]


def named(verifiers: Sequence[VerifierConfig]) -> list[tuple[str, VerifierConfig]]:
    """Return the run's verifiers with their names."""
    return list(zip(verifier_names(verifiers), verifiers, strict=True))
