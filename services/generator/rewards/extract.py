"""Finding the answer inside a completion by a pattern of the user's."""

from __future__ import annotations

import re


class Extractor:
    """The first group of the pattern's last match, stripped; without a pattern the whole completion."""

    def __init__(self, key: str, pattern: str) -> None:
        self._pattern = compile_pattern(key, pattern) if pattern else None
        if self._pattern is not None and self._pattern.groups < 1:
            raise ValueError(f"{key} = {pattern!r} has no group: put the answer in parentheses")

    def __call__(self, completion: str) -> str | None:
        """The answer, or None where the pattern does not match."""
        if self._pattern is None:
            return completion.strip()
        found = None
        for match in self._pattern.finditer(completion):
            found = match.group(1)
        return None if found is None else found.strip()


def compile_pattern(key: str, pattern: str) -> re.Pattern[str]:
    """The compiled pattern, or a ValueError that names the key."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{key} = {pattern!r} is not a regular expression: {error}") from None
