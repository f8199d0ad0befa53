"""Worked examples: questions of the run's reasoning-gym task, answered step by step or at a glance.

Guarantees: every answer is the task's own and follows the last `= `; no example repeats a held-out question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.config.data import ReasoningGymSource

# Item i of a task comes from its seed + i, so seeds this far apart give other items. Sums of three numbers are few and recur.
WORKED_SEED = 1_000_000_000
HELD_OUT_SEED = 2_000_000_000


@dataclass(frozen=True)
class Example:
    """A question, the two ways to answer it, and the task's entry, with which answers are graded."""

    question: str
    step_by_step: str
    at_a_glance: str
    entry: dict[str, Any]


def solve(expression: str) -> str:
    """Turn `5 - 3 - 6` into `5 - 3 = 2, 2 - 6 = -4`: one sum or difference at a time, from the left."""
    terms = expression.split()
    total, equations = int(terms[0]), []
    for operator, term in zip(terms[1::2], terms[2::2], strict=True):
        if operator not in ("+", "-"):
            raise ValueError(f"data.sources.0.options.operators contains {operator!r}: worked examples support only '+' and '-'")
        before, total = total, total + int(term) if operator == "+" else total - int(term)
        equations.append(f"{before} {operator} {term} = {total}")
    return ", ".join(equations)


def make_task(source: ReasoningGymSource, size: int, seed: int) -> Any:
    """Return the task of the run with another size and seed."""
    from reasoning_gym.factory import create_dataset

    return create_dataset(source.task, **{**source.options, "size": size, "seed": seed})


def make_examples(source: ReasoningGymSource, held_out: int, worked: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Return (`held_out`, `worked`) examples with different questions, the same for the same seed."""
    asked = _examples(make_task(source, held_out, HELD_OUT_SEED + seed * held_out))
    kept = list(asked)
    known = {example.question for example in kept}
    rest = _examples(make_task(source, 2 * worked, WORKED_SEED + seed * 2 * worked))
    learnt = [example for example in rest if example.question not in known][:worked]
    return kept, learnt


def _examples(task: Any) -> Iterator[Example]:
    for entry in task:
        yield Example(entry["question"], solve(entry["metadata"]["expression"]), f"= {entry['answer']}", entry)
