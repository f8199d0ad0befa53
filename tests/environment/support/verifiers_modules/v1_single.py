"""A single-turn environment for the v1 API of verifiers."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false - it runs elsewhere

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """A question and its answer."""

    answer: str = ""


class SumTask(vf.Task[SumData]):
    """Scores the digits of a reply."""

    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        """Return the fraction of the digits 0 to 3 that the reply contains."""
        return sum(digit in trace.last_reply for digit in "0123") / 4

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        """Return the length of the reply."""
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    """The settings of the questions."""

    rows: int = 4


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Questions about sums."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks."""
        for number in range(self.config.rows):
            yield SumTask(
                SumData(prompt=f"What is {number} + 1?", system_prompt="Be brief.", answer=str(number + 1)), self.config.task
            )
