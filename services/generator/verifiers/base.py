"""What a verifier is, how verifiers are named, and how their scores become a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.config.data import VerifierConfig, verifier_names


class VerifierFailure(Exception):
    """Scores could not be had: a verifier broke, ran past its time limit or its process died. Not a score of zero."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Verifier(Protocol):
    """Judges completions. Lives in a worker process, which may be killed in mid-call."""

    def score(self, completion: str, answer: str) -> float:
        """Score in 0..1 of one completion against the ticket's answer. Raises whatever went wrong."""
        ...


def combine(scores: Mapping[str, Sequence[float]], verifiers: Sequence[VerifierConfig]) -> list[float]:
    """Rewards [n]: the scores of those of the run's verifiers that there are, each times its weight, added up."""
    columns = [[verifier.weight * score for score in scores[name]] for name, verifier in named(verifiers) if name in scores]
    return [sum(row) for row in zip(*columns, strict=True)]


def named(verifiers: Sequence[VerifierConfig]) -> list[tuple[str, VerifierConfig]]:
    """The run's verifiers with their names."""
    return list(zip(verifier_names(verifiers), verifiers, strict=True))
