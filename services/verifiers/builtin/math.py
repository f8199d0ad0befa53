"""`math`: the completion's answer equals the gold answer as mathematics.

The answer is the last `\\boxed{…}` or `#### …`, whichever comes later; else what follows the last "answer is"; else the last
number or expression of the text. Plain quantities are compared exactly (quantity.py), everything else by math-verify. A
completion whose answer cannot be parsed scores 0. A gold answer that cannot be parsed is a fault of the data and raises.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from services.config.data import Source
from services.config.verifiers import MathConfig
from services.verifiers.builtin import quantity

TAIL_CHARACTERS = 2_000
"""Length of the completion's end that is searched for an unmarked answer."""
ANSWER_CHARACTERS = 1_000
"""A marked answer longer than this does not count."""

POWER = 512
"""An answer with a larger power or factorial than this and than the gold answer's does not count: it could take minutes."""

_POWER = re.compile(r"(?:\^|\*\*)\s*[{(]?\s*[-+]?\s*(\d+)|(\d+)\s*!")
_TOWER = re.compile(r"(?:\^|\*\*)\s*(?:\{[^{}]*|\([^()]*|\w+\s*)(?:\^|\*\*)")
_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(\{|\S)")
_STATED = re.compile(r"(?i)\banswer\s*(?:is|:|=)")


class MathVerifier:
    """Scores 1 for an equal answer, else 0."""

    def __init__(self, config: MathConfig, source: Source) -> None:
        self._gold = lru_cache(maxsize=64)(_read_gold)

    def score(self, completion: str, answer: str) -> float:
        """Return 1.0 or 0.0. Raises ValueError for a gold answer that is not mathematics."""
        gold, expression = self._gold(answer)
        marked = marked_answer(completion)
        if gold is not None:
            found = _stated(completion[-TAIL_CHARACTERS:]) if marked is None else quantity.read(marked)
            if found is not None:
                return float(quantity.equal(gold, found))
        if marked is not None:
            if _text(marked) == _text(answer):
                return 1.0
            return float(_largest_power(marked) <= max(POWER, _largest_power(answer)) and _equal(expression, _boxed(marked)))
        return float(gold is None and _equal(expression, completion[-TAIL_CHARACTERS:]))


def marked_answer(completion: str) -> str | None:
    """Return the content of the last `\\boxed{…}` or `#### …`, whichever comes later: None if neither exists, "" if unclosed."""
    place, answer = -1, None
    at = max(completion.rfind("\\boxed"), completion.rfind("\\fbox"))
    if at >= 0:
        place, answer = at, _boxed_content(completion, at)
    at = completion.rfind("####")
    if at > place and (match := _MARKED.match(completion, at)) is not None:
        # Four signs also mark a heading; then text follows, and the line is not a number.
        closing = not completion[match.end() :].strip()
        if match[1].strip() and (closing or quantity.read(match[1]) is not None):
            answer = match[1].strip() if len(match[1]) <= ANSWER_CHARACTERS else ""
    return answer


def _boxed_content(text: str, at: int) -> str:
    match = _BOXED.match(text, at)
    if match is None:
        return ""
    if match[1] != "{":
        return match[1]
    depth = 1
    for end in range(match.end(), min(len(text), match.end() + ANSWER_CHARACTERS)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[match.end() : end]
    return ""


def _stated(tail: str) -> quantity.Quantity | None:
    """Return the number after the last "answer is", else the last number; None if it is part of an expression."""
    stated = [match.end() for match in _STATED.finditer(tail)]
    if stated and quantity.states_number(answer := tail[stated[-1] :]):
        return quantity.first_in(answer)
    return quantity.last_in(tail)


def _read_gold(answer: str) -> tuple[quantity.Quantity | None, list[Any]]:
    plain = quantity.read(answer)
    expression = _parse(_boxed(f"{plain.value}" if plain else answer))
    if not expression:
        raise ValueError(f"gold answer {answer!r} cannot be parsed as mathematics: use the verifier `exact`, or fix the data")
    return plain, expression


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _largest_power(text: str) -> float:
    """Return the largest exponent or factorial that the text states; infinity if an exponent has one of its own."""
    if _TOWER.search(text):
        return math.inf
    return max((float(power or factorial) for power, factorial in _POWER.findall(text)), default=0.0)


def _text(answer: str) -> str:
    return re.sub(r"\\text\s*\{([^{}]*)\}|\s+", lambda m: m[1] or "", answer).lower()


def _parse(text: str) -> list[Any]:
    # The worker enforces time limits, so math-verify's own are off.
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _equal(gold: list[Any], text: str) -> bool:
    return verify(gold, _parse(text), timeout_seconds=None)
