"""`regex`: the pattern matches somewhere in the completion."""

from __future__ import annotations

import re

from services.config.data import Source
from services.config.verifiers import RegexConfig

PLACEHOLDER = "{answer}"


class RegexVerifier:
    """Scores 1 for a match, else 0. `{answer}` in the pattern is replaced by the escaped gold answer."""

    def __init__(self, config: RegexConfig, source: Source) -> None:
        self._pattern = config.pattern

    def score(self, completion: str, answer: str) -> float:
        """Return 1.0 or 0.0."""
        return float(re.search(self._pattern.replace(PLACEHOLDER, re.escape(answer)), completion) is not None)
