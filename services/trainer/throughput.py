"""Tokens per second of a step, trained and generated, and the FLOP/s of its training. Pure: times are passed in.

Guarantees: a rate counts only tokens produced in the time it is divided by. A trainer that resumes a run finds plans whose
groups were generated before it began: it gives them no rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW = 4
"""Steps over which tokens are counted as generated: groups of several steps may end together."""


class Throughput:
    """Rates between the records of consecutive steps."""

    def __init__(self, now: float, devices: int = 1, peak_tflops: float = 0.0) -> None:
        """`now`: monotonic seconds. `devices`: of the trainer. `peak_tflops`: of one of them, 0 if unknown, for no MFU."""
        self._devices, self._peak_tflops = devices, peak_tflops
        self._recorded = now  # when the last step was recorded
        self._generated: float | None = 0.0  # the counter in the plan of that step; None: of a step of another process
        self._known = -1  # last step whose plan was made before this process trained
        # Seconds and generated tokens of the steps before, without the first: its groups began before the trainer was ready.
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW - 1)
        self._counted = False

    def resume(self, prepared_step: int) -> None:
        """Take the plans up to `prepared_step` as made before."""
        self._known = prepared_step
        if prepared_step >= 0:
            self._generated = None

    def start(self, now: float) -> None:
        """Count the time of the next step from `now`, when the trainer is ready for it."""
        self._recorded = now

    def record(self, step: int, tokens: float, generated: float, now: float) -> dict[str, float]:
        """Return the rates of a step that trained `tokens`.

        `generated`: tokens generated since dataprep's leader started, when it planned the step. The counter falls when another
        leads: what it counts then was generated since.
        """
        elapsed_s, before = now - self._recorded, self._generated
        self._recorded, self._generated = now, generated
        rates = {"throughput/trained/tokens_per_s": tokens / elapsed_s, "time/elapsed_s": elapsed_s}
        if step > self._known and before is not None:
            made = elapsed_s, generated - before if generated >= before else generated
            seconds, tokens_made = map(sum, zip(*self._window, made, strict=True))
            rates["throughput/generated/tokens_per_s"] = tokens_made / seconds
            if self._counted:
                self._window.append(made)
            self._counted = True
        return rates

    def utilization(self, record: Mapping[str, float]) -> dict[str, float]:
        """Return the rates of one device, from the record of a step with what `record` returned.

        MFU is over the time of the step's training (`compute`), and over all time since the last record (`wall`).
        """
        per_s = record["throughput/trained/tokens_per_s"]
        rates = {"throughput/trained/tokens_per_s_per_device": per_s / self._devices}
        flops, trained_s = record.get("flops/train/sum", 0.0), record.get("time/train/total_s", 0.0)
        if not (flops and trained_s):
            return rates
        rates["throughput/trained/tflops_per_device"] = flops / trained_s / self._devices / 1e12
        if peak := self._peak_tflops:
            rates["mfu/train/compute"] = rates["throughput/trained/tflops_per_device"] / peak
            rates["mfu/train/wall"] = flops / record["time/elapsed_s"] / self._devices / 1e12 / peak
        return rates
