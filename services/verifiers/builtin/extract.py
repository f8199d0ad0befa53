"""Finds the answer inside a completion with a user's pattern."""

from __future__ import annotations

import re


class Extractor:
    """Extracts the first group of the pattern's last match, stripped; without a pattern, the whole completion."""

    def __init__(self, pattern: str) -> None:
        """`pattern` has a group; the configuration checks that."""
        self._pattern = re.compile(pattern) if pattern else None

    def __call__(self, completion: str) -> str | None:
        """Return the answer, or None if the pattern does not match."""
        if self._pattern is None:
            return completion.strip()
        found = None
        for match in self._pattern.finditer(completion):
            found = match.group(1)
        return None if found is None else found.strip()
