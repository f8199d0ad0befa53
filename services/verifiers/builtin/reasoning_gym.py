"""`reasoning_gym`: the scorer of the task that generated the prompt. The ticket's answer holds the task's entry."""

from __future__ import annotations

from functools import lru_cache

from services.config.data import ReasoningGymSource, Source
from services.config.verifiers import ReasoningGymConfig
from services.protocol.entries import decode_entry
from services.runtime.reasoning_tasks import import_factory
from services.verifiers.builtin.extract import Extractor


class ReasoningGymVerifier:
    """Gives the task's own score, which may be partial."""

    def __init__(self, config: ReasoningGymConfig, source: Source) -> None:
        if not isinstance(source, ReasoningGymSource):
            raise ValueError(
                f'verifiers: kind "reasoning_gym" needs a source of kind "reasoning_gym", but "{source.name}" is "{source.kind}"'
            )
        self._extract = Extractor(config.extract)
        self._task = import_factory().create_dataset(source.task, **source.arguments)
        self._entry = lru_cache(maxsize=8)(decode_entry)

    def score(self, completion: str, answer: str) -> float:
        """Return the task's score of the extracted answer; a missing answer is passed as None, as the task expects.

        0.0 if the task's scorer raises because of the answer, as some do for a text of another form; raises if it raises anyway.
        """
        found, entry = self._extract(completion), self._entry(answer)
        try:
            return float(self._task.score_answer(found, entry))
        except Exception:  # code of the library's many authors
            self._task.score_answer(entry.get("answer"), entry)
            return 0.0
