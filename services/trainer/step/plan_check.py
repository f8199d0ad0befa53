"""Whether a plan fits the configuration and the rows that a rank got for it."""

from __future__ import annotations

import math

from services.config import RunConfig
from services.protocol.messages import StepPlan


def fault(plan: StepPlan, rows: int, early: int, config: RunConfig) -> str:
    """Return what is wrong with a plan, or with the number of rows that this rank got for it; or an empty string.

    `early`: rows that were already trained on, which `rows` leaves out.
    """
    if plan.ranks != config.data_parallel:
        return (
            f"step {plan.step} was planned for {plan.ranks} data-parallel ranks, but "
            f"trainer.ranks / trainer.sequence_parallel is {config.data_parallel}"
        )
    if early + rows != plan.rows_per_rank or sum(plan.mini_batch_rows) != plan.rows_per_rank:
        return (
            f"step {plan.step} has {plan.rows_per_rank} rows per rank in mini-batches of {plan.mini_batch_rows}, "
            f"but there are {early + rows} rows"
        )
    if len(plan.denominators) != len(plan.mini_batch_rows) or min(plan.mini_batch_rows, default=0) < 1:
        return f"step {plan.step}: mini-batches of {plan.mini_batch_rows} rows do not match denominators {plan.denominators}"
    if early and (len(plan.mini_batch_rows) > 1 or not rows):
        return (
            f"step {plan.step}: {early} rows were trained on early, but it has {rows} others in mini-batches of "
            f"{plan.mini_batch_rows} rows, not one mini-batch that ends with another row"
        )
    if not all(math.isfinite(value) and value >= 0 for value in plan.denominators):
        return f"step {plan.step}: denominators {plan.denominators} must be finite and not negative"
    return ""
