"""Tokens per second of a step, trained and generated. Pure: times are passed in.

Guarantees: a rate counts only what was made in the time that it is divided by. A trainer that resumes a run finds plans whose
groups were generated before it began: it gives them no rate.
"""

from __future__ import annotations


class Throughput:
    """Rates between the records of consecutive steps."""

    def __init__(self, now: float) -> None:
        """`now`: monotonic seconds."""
        self._recorded = now  # when the last step was recorded
        self._generated = 0.0  # the counter in the plan of that step
        self._known = -1  # last step whose plan was made before this process trained

    def resume(self, prepared_step: int) -> None:
        """Take the plans up to `prepared_step` as made before."""
        self._known = prepared_step

    def record(self, step: int, tokens: float, generated: float, now: float) -> dict[str, float]:
        """Return the rates of a step that trained `tokens`.

        `generated`: tokens generated since dataprep's leader started, when it planned the step. The counter falls when another
        leads: what it counts then was generated since.
        """
        elapsed_s, made = now - self._recorded, generated - self._generated
        self._recorded, self._generated = now, generated
        rates = {"throughput/trained/tokens_per_s": tokens / elapsed_s}
        if step > self._known:
            rates["throughput/generated/tokens_per_s"] = (made if made >= 0 else generated) / elapsed_s
        return rates
