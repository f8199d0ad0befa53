"""`exact`: the completion's answer equals the gold answer, character by character, ignoring surrounding white space."""

from __future__ import annotations

from services.config.data import Source
from services.config.verifiers import ExactConfig
from services.verifiers.builtin.extract import Extractor


class ExactVerifier:
    """Scores 1 for equal text, else 0."""

    def __init__(self, config: ExactConfig, source: Source) -> None:
        self._extract = Extractor(config.extract)

    def score(self, completion: str, answer: str) -> float:
        """Return 1.0 or 0.0."""
        return float(self._extract(completion) == answer.strip())
