"""A reward of your own: half for the right answer, half for the steps that lead to it."""

import re
from typing import Any

STEP = re.compile(r"(-?\d+) ([+-]) (\d+) = (-?\d+)")


def score(completion: str, answer: str, row: dict[str, Any]) -> dict[str, float]:
    right = completion.rpartition("= ")[2] == answer
    steps = sum(int(a) + int(sign + b) == int(c) for a, sign, b, c in STEP.findall(completion))
    shown = min(steps / row["steps"], 1)
    return {"score": (right + shown) / 2, "right": right, "shown": shown}
