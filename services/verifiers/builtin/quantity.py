"""Parses plain quantities in text exactly, without a computer algebra system: `72`, `$1,234.50`, `-3/4`, `50\\%`, `5 cm^2`,
`\\frac{1}{2}`. Most answers are of this kind, and this is a hundred times faster than parsing them as LaTeX."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 200
"""A longer text is not a plain quantity."""
DECIMALS = 6
"""Decimal places to which decimal fractions are rounded before comparison, as in math-verify."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
# A unit is a word after a space, or one of these directly after the number; "2xy" and "2pi" are expressions.
_ATTACHED = r"(?:[kcm]m|k?g|mg|m?[lL]|ft|in|lbs?|oz|hrs?|min|sec|s|am|pm|mph|kWh|dollars|cents)"
_UNIT = rf"(?:(?:{_ATTACHED}\b|\s+(?!pi\b)(?:[a-zA-Zµ]{{2,}}|[mgshlLAVNJWKCFkt]\b))[a-zA-Zµ.\s/·-]*(?:\^\{{?[23]\}}?|[²³])?)"
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)(?P<number>{_DIGITS})(?:\s?/\s?(?P<over>\d+))?(?:\s*(?P<percent>%|percent\b))?(?P<unit>{_UNIT}?)"
)
_IN_TEXT = re.compile(rf"(?<![\w.^])(?<!\^\{{){_DIGITS}(?:\s?/\s?\d+)?(?:\s?%)?")
# What makes a number in running text part of an expression: "2x", "2\sqrt{3}", "2^10", "1e-7", "\frac{2}{x}"; not "5cm" or "3rd".
_FUNCTIONS = r"(?:sqrt|pi|[dt]?frac|cdot|times|div|log|ln|exp|sin|cos|tan|theta|alpha|beta|infty|pm|mp|binom|sum|prod|int)"
_GOES_ON = re.compile(
    rf"\^(?!\{{?(?:st|nd|rd|th)\b)|\s?\\{_FUNCTIONS}\b|\s?π|\}}\s*\{{|(?!(?:{_ATTACHED}|st|nd|rd|th|µ\w+)\b)[^\W\d_]"
)
# "10-4" and "10 - 4" are differences, "- 4" at the start of a line is a list item; "is -4" and "= -4" are negative numbers.
_NEGATIVE = re.compile(r"(?:(?:^|[^\w)\s])\s*|[a-zA-Z]\s+)-$|=\s*-\s*$")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)(\d))")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_ASSIGNMENT = re.compile(r"[^=<>,;]*[^=<>,;!:\\]=([^=<>,;]+)")
_SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000, "trillion": 1_000_000_000_000}
# "5 or" and "5 log" are not one quantity with a unit.
_NO_UNITS = {"or", "and", "to", "plus", "minus", "times", "over", "mod", "sin", "cos", "tan", "log", "ln", "exp", "sqrt"}
_REPLACED = {
    "−": "-", "–": "-", "{,}": ",", "\\%": "%", "٪": "%",
    "\\left": "", "\\right": "", "\\!": "", "\\displaystyle": "", "^\\circ": " ", "^{\\circ}": " ", "\\degree": " ", "°": " ",
    "\\$": "", "$": "", "€": "", "£": "", "¥": "", "₹": "", "\\(": "", "\\)": "", "\\[": "", "\\]": "",
}  # fmt: skip
_NARROW = re.compile(r"(?<=\d)(?:\\,|\u2009|\u202f|\\ )(?=\d{3})")
_SPACES = re.compile(r"\\[,;: ]|~|\s")


@dataclass(frozen=True)
class Quantity:
    """An exact value; `percent` if it was written with a percent sign, `decimal` if with a decimal point."""

    value: Fraction
    percent: bool = False
    decimal: bool = False


def read(text: str) -> Quantity | None:
    """Return the quantity that the whole of `text` states, ignoring units, currency and `x =`, or None if it is anything else."""
    if len(text) > MAX_CHARACTERS:
        return None
    text = _plain(text)
    if (assignment := _ASSIGNMENT.fullmatch(text)) is not None:
        text = assignment.group(1).strip()
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    words = match["unit"].lower().split()
    if _NO_UNITS.intersection(words):
        return None
    scale = _SCALES.get(words[0], 1) if words else 1
    return _quantity(match["sign"], match["number"], match["over"], match["percent"] is not None, scale)


def states_number(text: str) -> bool:
    """Return whether running text has a number, alone or in an expression."""
    return _IN_TEXT.search(_plain(text)) is not None


def last_in(text: str) -> Quantity | None:
    """Return the last number in running text, including its sign, percent sign and denominator, or None if it is part of an
    expression.
    """
    text = _plain(text)
    found = list(_IN_TEXT.finditer(text))
    return _in_text(text, found[-1]) if found else None


def first_in(text: str) -> Quantity | None:
    """Return the first number in running text, as `last_in` does."""
    text = _plain(text)
    found = _IN_TEXT.search(text)
    return None if found is None else _in_text(text, found)


def equal(gold: Quantity, found: Quantity) -> bool:
    """Return whether the values are equal. If only one is written as a percentage, `50%` equals both 50 and 0.5."""
    decimal = gold.decimal or found.decimal
    readings = [(gold.value, found.value)]
    if found.percent and not gold.percent:
        readings.append((gold.value, found.value / 100))
    elif gold.percent and not found.percent:
        readings.append((gold.value / 100, found.value))
    return any(a == b or (decimal and round(a, DECIMALS) == round(b, DECIMALS)) for a, b in readings)


def _plain(text: str) -> str:
    """Return the text without LaTeX and currency signs that do not change a value."""
    text = _NARROW.sub(",", text)
    for old, new in _REPLACED.items():
        text = text.replace(old, new)
    text = _TEXT.sub(r" \1", text)
    text = _FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]}", text)
    return _SPACES.sub(" ", text).strip(" *").rstrip(".,;: ")


def _in_text(text: str, match: re.Match[str]) -> Quantity | None:
    if _GOES_ON.match(text, match.end()):
        return None
    negative = _NEGATIVE.search(text[max(0, match.start() - 16) : match.start()]) is not None
    number, _, over = match.group().rstrip("% ").partition("/")
    return _quantity("-" if negative else "", number.strip(), over.strip() or None, match.group().endswith("%"), 1)


def _quantity(sign: str, number: str, over: str | None, percent: bool, scale: int) -> Quantity | None:
    if over is not None and int(over) == 0:
        return None
    value = Fraction(number.replace(",", "").rstrip(".")) / int(over or 1) * scale
    return Quantity(-value if sign == "-" else value, percent, "." in number)
