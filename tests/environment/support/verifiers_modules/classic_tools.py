"""An environment with a tool for the classic API of verifiers."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false - it runs elsewhere

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def load_environment(rows: int = 4) -> Any:
    """Return the environment."""

    def digits(completion: Any) -> float:
        return sum(digit in str(completion) for digit in "0123") / 4

    data = Dataset.from_list([{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(rows)])
    return vf.ToolEnv(dataset=data, tools=[add], rubric=vf.Rubric(funcs=[digits]), max_turns=4)
