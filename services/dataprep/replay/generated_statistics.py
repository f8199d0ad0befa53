"""Metrics of what was generated since the last step (`…/gen/…`). Pure, without clock or Redis.

Guarantees: every key is in docs/metrics.md; memory grows only with the number of sources, not with what arrives.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from services.groups.group_statistics import GroupSums
from services.protocol.messages import Header

DROPS: tuple[str, ...] = ("zero", "solved", "nonzero", "all_truncated", "stale", "failed")
"""Reasons for which a group does not reach the table (docs/design.md, section 3)."""

DRIFT_STEPS = 32
"""Steps over which trained and generated lengths are compared; more than pass between a group's birth and its training."""


class GeneratedStats:
    """Running sums of what arrived since the last step."""

    def __init__(self, sources: Sequence[str]) -> None:
        """`sources`: names of the prompt sources."""
        self._sources = sources
        self._tokens = 0
        self._drift: deque[tuple[int, int, int, int]] = deque(maxlen=DRIFT_STEPS)
        self._begin()

    def _begin(self) -> None:
        self._seen = GroupSums(self._sources)
        self._dropped: Counter[str] = Counter(dict.fromkeys(DROPS, 0))

    def add(self, header: Header) -> None:
        """Count a valid settled header, whatever the outcome of its group."""
        self._seen.add(header)
        self._tokens += sum(header.lengths)

    def drop(self, outcome: str) -> None:
        """Count a group that was settled without reaching the table: `stale`, `filtered:<reason>` or `failed:<text>`."""
        kind, _, reason = outcome.partition(":")
        self._dropped[reason if kind == "filtered" else kind] += 1

    def record(self, trained: Sequence[Header]) -> dict[str, float]:
        """Return the metrics since the last step; `trained` are the groups of the step being made. Changes nothing.

        `tokens/gen/total` counts from the start of the process. `length/drift` is the mean length of trained segments over
        that of generated ones, both over the last `DRIFT_STEPS` steps. Anything that keeps long groups from being trained on
        (overtaking, filters, staleness) makes it less than 1.
        """
        record = self._seen.metrics("gen") | {f"filtered/{reason}/count": float(n) for reason, n in self._dropped.items()}
        record["tokens/gen/total"] = float(self._tokens)
        lengths = [*self._drift, self._lengths(trained)][-DRIFT_STEPS:]
        made_tokens, made, trained_tokens, count = (sum(column) for column in zip(*lengths, strict=True))
        if made and count:
            record["length/drift"] = (trained_tokens / count) / (made_tokens / made)
        return record

    def next_step(self, trained: Sequence[Header]) -> None:
        """Start counting for the next step, now that the step of these groups is made."""
        self._drift.append(self._lengths(trained))
        self._begin()

    def _lengths(self, trained: Sequence[Header]) -> tuple[int, int, int, int]:
        chosen = [length for header in trained for length in header.lengths]
        return self._seen.all.tokens, self._seen.all.segments, sum(chosen), len(chosen)
