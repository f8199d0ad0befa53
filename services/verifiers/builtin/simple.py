"""The built-in verifiers but `math`: `exact`, `regex`, `length` and `reasoning_gym`."""

from __future__ import annotations

import re
from functools import lru_cache

from services.config.data import ReasoningGymSource, Source
from services.config.verifiers import ExactConfig, LengthConfig, ReasoningGymConfig, RegexConfig
from services.protocol.entries import decode_entry
from services.runtime.reasoning_tasks import import_factory
from services.verifiers.base import Overtime

PLACEHOLDER = "{answer}"


class Extractor:
    """Extracts the first group of the pattern's last match, stripped; without a pattern, the whole text."""

    def __init__(self, pattern: str) -> None:
        """`pattern` has a group; the configuration checks that."""
        self._pattern = re.compile(pattern) if pattern else None

    def __call__(self, text: str) -> str | None:
        """Return the answer, or None if the pattern does not match."""
        if self._pattern is None:
            return text.strip()
        found = None
        for match in self._pattern.finditer(text):
            found = match.group(1)
        return None if found is None else found.strip()


class ExactVerifier:
    """`exact`: scores 1 for the gold answer, character by character without surrounding white space, else 0."""

    def __init__(self, config: ExactConfig, source: Source) -> None:
        self._extract = Extractor(config.extract)

    def score(self, reply: str, answer: str) -> float:
        """Return 1.0 or 0.0."""
        return float(self._extract(reply) == answer.strip())


class RegexVerifier:
    """`regex`: scores 1 for a match, else 0. `{answer}` in the pattern is replaced by the escaped gold answer."""

    def __init__(self, config: RegexConfig, source: Source) -> None:
        self._pattern = config.pattern

    def score(self, completion: str, answer: str) -> float:
        """Return 1.0 or 0.0."""
        return float(re.search(self._pattern.replace(PLACEHOLDER, re.escape(answer)), completion) is not None)


class LengthVerifier:
    """`length`: scores 0 up to `max_tokens - soft_tokens`, then falls linearly to -1 at `max_tokens`.

    This is DAPO's overlong punishment (Yu et al. 2025, equation 13).
    """

    def __init__(self, config: LengthConfig, max_tokens: int) -> None:
        self._limit, self._soft = max_tokens, config.soft_tokens

    def score(self, tokens: list[int]) -> float:
        """Return the score in -1..0 of one completion."""
        return 0.0 - min(1.0, max(0, len(tokens) - (self._limit - self._soft)) / self._soft)


class ReasoningGymVerifier:
    """`reasoning_gym`: gives the own score of the task that generated the prompt, which may be partial.

    The ticket's answer holds the task's entry.
    """

    scores_overtime = True

    def __init__(self, config: ReasoningGymConfig, source: Source) -> None:
        if not isinstance(source, ReasoningGymSource):
            raise ValueError(
                f'verifiers: kind "reasoning_gym" needs a source of kind "reasoning_gym", but "{source.name}" is "{source.kind}"'
            )
        self._extract = Extractor(config.extract)
        self._task = import_factory().create_dataset(source.task, **source.arguments)
        self._entry = lru_cache(maxsize=8)(decode_entry)

    def score(self, reply: str, answer: str) -> float:
        """Return the task's score of the extracted answer; a missing answer is passed as None, as the task expects.

        0.0 if the task's scorer raises or takes too long because of the answer, as some do for a text of another form; raises if
        it raises anyway.
        """
        found, entry = self._extract(reply), self._entry(answer)
        try:
            return float(self._task.score_answer(found, entry))
        except (Exception, Overtime):  # code of the library's many authors
            self._task.score_answer(entry.get("answer"), entry)
            return 0.0
