"""Metrics of what was generated since the last step (`…/gen/…`). No clock, no Redis.

Guarantees: every key is in docs/metrics.md; memory does not grow with what arrives, only with the number of sources.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from services.algorithm.group_statistics import GroupSums
from services.protocol.messages import Header

DROPS: tuple[str, ...] = ("zero", "solved", "nonzero", "all_truncated", "stale", "failed")
"""Reasons for which a group does not reach the table (docs/design.md, section 3)."""

DRIFT_STEPS = 32
"""Steps over which trained and generated lengths are compared: more than lie between a group's birth and its training."""


class GeneratedStats:
    """What arrived since the last step, as running sums."""

    def __init__(self, sources: Mapping[str, float]) -> None:
        """`sources`: name of every prompt source and the largest reward its completions can earn."""
        self._sources = dict(sources)
        self._tokens = 0
        self._drift: deque[tuple[int, int, int, int]] = deque(maxlen=DRIFT_STEPS)
        self._begin()

    def _begin(self) -> None:
        self._seen = GroupSums(self._sources)
        self._dropped: Counter[str] = Counter(dict.fromkeys(DROPS, 0))

    def add(self, header: Header) -> None:
        """A valid header that was settled, whatever became of its group."""
        self._seen.add(header)
        self._tokens += sum(header.lengths)

    def drop(self, outcome: str) -> None:
        """A group that was settled without reaching the table: `stale`, `filtered:<reason>` or `failed:<text>`."""
        kind, _, reason = outcome.partition(":")
        self._dropped[reason if kind == "filtered" else kind] += 1

    def record(self, trained: Sequence[Header]) -> dict[str, float]:
        """Metrics since the last step; `trained` are the groups of the step that is made now. Changes nothing.

        `tokens/gen/total` counts from the start of the process. `length/drift` is the mean completion length trained over
        that generated, both over the last `DRIFT_STEPS` steps: what keeps long groups from being trained (overtaking,
        filters, staleness) pulls it below 1.
        """
        record = self._seen.metrics("gen") | {f"filtered/{reason}/count": float(n) for reason, n in self._dropped.items()}
        record["tokens/gen/total"] = float(self._tokens)
        lengths = [*self._drift, self._lengths(trained)][-DRIFT_STEPS:]
        made_tokens, made, trained_tokens, count = (sum(column) for column in zip(*lengths, strict=True))
        if made and count:
            record["length/drift"] = (trained_tokens / count) / (made_tokens / made)
        return record

    def next_step(self, trained: Sequence[Header]) -> None:
        """The step of these groups was made: count for the next one."""
        self._drift.append(self._lengths(trained))
        self._begin()

    def _lengths(self, trained: Sequence[Header]) -> tuple[int, int, int, int]:
        chosen = [length for header in trained for length in header.lengths]
        return self._seen.all.tokens, self._seen.all.completions, sum(chosen), len(chosen)
