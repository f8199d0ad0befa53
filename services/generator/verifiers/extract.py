"""Finding the answer inside a completion by a pattern of the user's."""

from __future__ import annotations

import re


class Extractor:
    """The first group of the pattern's last match, stripped; without a pattern the whole completion."""

    def __init__(self, pattern: str) -> None:
        """`pattern` has a group, which the configuration has seen to."""
        self._pattern = re.compile(pattern) if pattern else None

    def __call__(self, completion: str) -> str | None:
        """The answer, or None where the pattern does not match."""
        if self._pattern is None:
            return completion.strip()
        found = None
        for match in self._pattern.finditer(completion):
            found = match.group(1)
        return None if found is None else found.strip()
