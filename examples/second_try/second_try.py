"""An environment of your own: a wrong answer gets a reply and a second try."""

from typing import Any


class SecondTry:
    def __init__(self, tries: int = 2) -> None:
        self.tries, self.tried, self.right = tries, 0, False

    def start(self, row: dict[str, Any]) -> None:
        self.answer = row["answer"]

    def turn(self, message: dict[str, Any]) -> str | None:
        self.tried += 1
        self.right = message["content"].rpartition("= ")[2] == self.answer
        return None if self.right or self.tried == self.tries else "Calculate again."

    def score(self) -> dict[str, float]:
        first = float(self.right and self.tried == 1)
        return {"score": 1.0 if first else 0.5 * self.right, "first": first}
