"""An environment with tools: the reward is 1 if the final reply is the product, which the calculator can compute."""

from typing import Any


class Calculator:
    tools = ["add", "multiply", "subtract"]

    def start(self, row: dict[str, Any]) -> None:
        self.answer = row["answer"]
        self.said = ""

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    def subtract(self, a: int, b: int) -> int:
        """Subtract the second number from the first."""
        return a - b

    def turn(self, message: dict[str, Any]) -> None:
        self.said = message["content"]  # a reply without tool calls ends the rollout

    def score(self) -> float:
        return float(self.said == f"= {self.answer}")
