"""The grammar of answers: reads a whole statement, such as `72 cm`, `x = 5`, `(1, 2]` or `2, 3 and 5`, into a typed value.

Guarantees: a text is read as a whole or not at all; plain numbers are exact. Whatever is left, such as `2\\sqrt{3}`, is an
`Expression`, which math.py hands to math-verify.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from services.verifiers.builtin.notation import (
    COMMA,
    KNOWN,
    MONTH,
    MORE,
    are_operators,
    balanced,
    masked,
    plain,
    split,
    units_after,
)

CHARACTERS = 1_000
"""A longer text is no statement."""
EXPONENT = 400
"""A number with a larger power of ten than this is left to math-verify, which does not write it out."""
POWER, POWER_DIGITS = 512, 20
"""Plain arithmetic with larger powers, or powers of longer numbers, is left to math-verify, too."""


@dataclass(frozen=True)
class Statement:
    """What a text states. `text` is the text in small letters without white space that says nothing: equal texts are equal."""

    text: str


@dataclass(frozen=True)
class Number(Statement):
    """An exact value as it is written."""

    value: Fraction
    places: int | None = None
    """Decimal places, if it has a decimal point or an exponent."""
    digits: int = 0
    """Significant digits."""
    percent: bool = False
    units: frozenset[str] = frozenset()
    based: str = ""
    """The digits of a number that states its base."""


@dataclass(frozen=True)
class Ratio(Statement):
    """A ratio or a time: `2:3`, `7:30 pm`."""

    parts: tuple[Fraction, ...]
    half: str
    """`am` or `pm`, if stated."""
    is_time: bool


@dataclass(frozen=True)
class Words(Statement):
    """A word, a letter, a date, a range: equal only as text."""

    count: int = 1
    """Number of words."""


@dataclass(frozen=True)
class Expression(Statement):
    """LaTeX for math-verify."""

    latex: str
    units: frozenset[str] = frozenset()
    percent: bool = False


@dataclass(frozen=True)
class Items(Statement):
    """Several statements: with brackets a tuple, an interval or a set; without them a list."""

    opening: str
    closing: str
    entries: tuple[Statement, ...]
    latex: str


@dataclass(frozen=True)
class Relation(Statement):
    """An equation or inequality, or a chain of them."""

    sides: tuple[Statement, ...]
    signs: tuple[str, ...]
    latex: str

    @property
    def assigned(self) -> tuple[str, Statement] | None:
        """Return the name and the value of `x = 5`, of `5 = x`, and of `x = 2 + 3 = 5`; None for any other relation."""
        if not {*self.signs} <= {"=", "\\approx", "\\in"}:
            return None
        exact = self.sides[: self.signs.index("\\approx") + 1] if "\\approx" in self.signs else self.sides
        first, last = self.sides[0], exact[-1] if len(exact) > 1 else self.sides[-1]
        if is_name(first):
            return first.text, last
        return (last.text, first) if is_name(last) else None


# Names of quantities: x, x_1, f(2), AB, |AB|, \angle ABC, (p, q), AB/CD, A:B, a word.
_LETTER = r"(?:\\(?!frac|sqrt|pi\b|infty)[a-z]+\s*)?(?:[a-z]|\\[a-z]+)(?:_(?:\{[^{}]*\}|\w)|'|\^\{-1\}|\^\{\\prime\})*"
_CALL = r"(?:\((?:[^()]|\([^()]*\))*\))"
_UPPER = r"(?:\\(?:overline|angle|triangle|widehat|overrightarrow|vec|m)\s*\{?\s*)*[A-Z]{1,4}(?:_(?:\{[^{}]*\}|\w))?\}?"
_OF = rf"\\(?:gcd|lcm|deg|dim|det|max|min|operatorname\{{\w+\}}){_CALL}"
_ONE = rf"(?:{_UPPER}{_CALL}?|{_LETTER}{_CALL}?|\|\s*[A-Z]{{1,3}}\s*\||{_OF})"
_NAME = re.compile(rf"{_ONE}(?:\s*[:/]\s*{_ONE})?|\\frac\{{{_ONE}\}}\{{{_ONE}\}}|\(\s*{_ONE}(?:\s*,\s*{_ONE})+\s*\)")
_FUNCTION = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|arc\w+|pi|infty|binom|sum|prod|int|lim|cdot|times)\b")


def is_name(side: Statement) -> bool:
    """Return whether one side of an equation is a bare name, in symbols or in words."""
    if isinstance(side, Words):
        return True
    latex = side.latex if isinstance(side, Expression | Items) else ""
    return _NAME.fullmatch(latex) is not None and _FUNCTION.match(latex) is None and latex not in ("e", "i")


_RELATION = re.compile(r"(?<![<>])=|<|>|\\(?:leq?|geq?|neq?|approx|in|equiv|sim)(?![a-zA-Z])")
_SIGNS = {"\\leq": "\\le", "\\geq": "\\ge", "\\neq": "\\ne"}
_OR, _AND = (re.compile(rf"\s*,?\s*(?<![a-zA-Z\\]){word}(?![a-zA-Z])\s*") for word in ("or", "and"))
_SEMICOLON = re.compile(r"\s*;\s*")
_LEADING = re.compile(
    r"(?:(?:(?i:is|are|about|approximately|roughly|exactly|simply|just|only|clearly|equal to|equals|either|both|option|choice|"
    r"thus|so|therefore|hence|the)|an|a)\b(?!\s*(?:[-=^(+*/_<>,.:)\\]|and\b|or\b))\s*:?\s*|\\approx\s*|=\s*)+(?=\S)"
)
_CHOICE = re.compile(r"\(?([A-Z])[).:]\s*(\S.*)?|\(([a-zA-Z])\)")
_LITERAL = re.compile(
    r"\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{2,4}|(?:between\s+)?\S+\s+(?:to|through|until)\s+\S+(?:\s+[a-z]+)?|\d+\s*-\s*\d+\s+[a-z]+|"
    rf"not\b.*|.*\bor\s+{MORE}\b.*|(?:\d+\s+)?{MONTH}(?:\s+\d+(?:st|nd|rd|th)?)?(?:,?\s+\d{{4}})?"
)
_RATIO = re.compile(r"(\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+)\s*(?:([ap])\.?\s?m\.?)?(?:\s*o'clock)?", re.IGNORECASE)
_MEASURED = re.compile(r"(.*(?:[\d)}!\]]|\\pi))\s*((?:(?<=\s)[a-zA-Zµ]+|[/\s]|\^?\{?[23]\}?)+)")
_PROSE = re.compile(r"[a-zA-Z]{4,}|[a-zA-Z]{2,}\s+[a-zA-Z]|[a-zA-Z]\s+[a-zA-Z]{2,}")
_WORD = re.compile(r"[^\W\d_](?:[^\W\d_]|[\s'/.-])*")

_GROUPED = r"(?!0)\d{1,3}(?:[,\u2009]\d{3})+(?![\d])(?:\.\d+)?|\d{1,3}(?: \d{3})+(?!\d)(?:\.\d+)?"
_DIGITS = rf"(?:{_GROUPED}|\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<before>[-+]?)\s*(?P<currency>[¤$€£¥₹]?)\s*(?P<sign>[-+]?)\s*(?P<number>{_DIGITS})"
    r"(?:[eE](?P<e>[-+]?\d+)|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*(?P<power>[-+]?\d+)\s*\}|(?P<digit>[-+]?\d+)))?"
    r"(?:\s+(?P<top>\d+)\s?/\s?(?P<bottom>\d+)|\s*/\s*(?P<over>\d+))?"
    r"(?:\s*(?P<percent>%|(?:per\s?cent|pct)(?:age)?(?:\s+points?)?\b))?(?P<rest>.*)",
    re.DOTALL,
)
_BASED = re.compile(r"([0-9A-Fa-f]*\d[0-9A-Fa-f]*|[A-Fa-f]{2,}(?=_\{?16))_(?:\{\s*(?:\\text\s*)?(\w+)\s*\}|(\d+))")
_FRACTION = re.compile(r"(\d)?\s*\\frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_ARITHMETIC = re.compile(r"(?=.*\d)[\d\s.+*/^()-]+")
_IMPLICIT = re.compile(r"\d\s+\.?\d|\)\s*[\d(]|\d\s*\(|\^\s*[^\s\d({-]|//|\*\s*\*\s*\*")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COUNTS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)
_IN_WORDS = {word: str(number) for number, word in enumerate(_COUNTS.split())}


def read(text: str) -> Statement | None:
    """Return what the whole of `text` states, or None if it is no statement."""
    return _read(plain(text)) if len(text) <= CHARACTERS else None


def _read(text: str) -> Statement | None:
    text = text.strip(" *_\"'`").rstrip(".,;: *_\"'`").removeprefix("{}").strip()
    if not text:
        return None
    if (number := _number(text)) is not None:
        return number
    if (leading := _LEADING.match(text)) is not None and leading.end() < len(text) and (found := _read(text[leading.end() :])):
        return found
    key = _key(text)
    if _LITERAL.fullmatch(text) and any(character.isdigit() for character in text):
        return Words(key)
    if (match := _RATIO.fullmatch(text)) is not None:
        return _ratio(key, match)
    if text.lower() in _IN_WORDS:
        return _number(_IN_WORDS[text.lower()])
    return _arithmetic(text, key) or _several(text, key) or _relation(text, key) or _bracketed(text, key) or _single(text, key)


def _key(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|\u2009", "", text).lower()


def _arithmetic(text: str, key: str) -> Number | None:
    """Return the exact value of plain arithmetic, such as `48 + 24`, or None for anything else."""
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", re.sub(r"\\(?:cdot|times)(?![a-z])", "*", text))
    if _ARITHMETIC.fullmatch(text) is None or _IMPLICIT.search(text):
        return None
    text = text.replace("^", "**").strip()
    try:
        return Number(key, _evaluated(ast.parse(text, mode="eval").body, text))
    except (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.UnaryOp):
        value = _evaluated(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        return Fraction(ast.get_source_segment(text, node) or "")
    left, right = _evaluated(node.left, text), _evaluated(node.right, text)
    if isinstance(node.op, ast.Pow):
        if right.denominator > 1 or abs(right) > POWER or len(str(left)) > POWER_DIGITS:
            raise ValueError("left to math-verify")
        return Fraction(left**right)
    return _OPERATIONS[type(node.op)](left, right)


def _several(text: str, key: str) -> Statement | None:
    """Return a list, the value of `n = 1, 2`, or both values of `\\pm 2`."""
    for separator in () if "\\begin" in text else (_SEMICOLON, _OR, _AND, COMMA):
        parts = [part for part in split(text, separator) if part.strip()]
        if len(parts) < 2:
            continue
        found = [_read(part) for part in parts]
        entries = [entry for entry in found if entry is not None]
        if len(entries) < len(parts):
            return None
        first, rest = entries[0], entries[1:]
        if isinstance(first, Relation) and not any(isinstance(entry, Relation) for entry in rest) and len(first.sides) == 2:
            listed = Items(key, "", "", _flat([first.sides[1], *rest]), text)
            return Relation(key, (first.sides[0], listed), first.signs, text)
        return Items(key, "", "", _flat(entries) if separator is not _SEMICOLON else tuple(entries), text)
    if "\\pm" in text or "\\mp" in text:
        signs = [{"p": "+", "m": "-"}, {"p": "-", "m": "+"}]
        if (chosen := re.fullmatch(r"([^=]*=)?(.*)", text, re.DOTALL)) is not None:
            both = [_read(re.sub(r"\\([pm])[mp](?![a-z])", lambda m, s=s: s[m[1]], chosen[2])) for s in signs]
            entries = tuple(one for one in both if one is not None)
            listed = Items(key, "", "", entries, text)
            named = _read(chosen[1][:-1]) if chosen[1] else None
            if len(entries) == 2:
                return Relation(key, (named, listed), ("=",), text) if named else listed
    return None


def _flat(entries: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return entries with those of lists within lists, unless these are relations, which belong together."""
    flat: list[Statement] = []
    for entry in entries:
        if isinstance(entry, Items) and not entry.opening and not any(isinstance(one, Relation) for one in entry.entries):
            flat += entry.entries
        else:
            flat.append(entry)
    return tuple(flat)


def _relation(text: str, key: str) -> Statement | None:
    parts, signs = split(text, _RELATION), [match[0] for match in _RELATION.finditer(masked(text))]
    if len(parts) < 2:
        return None
    if not parts[0].strip():
        return _read(parts[-1])
    sides = [_read(part) for part in parts]
    named = [side for side in sides if side is not None]
    if sides[-1] is not None and len(named) < len(sides):  # a side in words that are no statement names what it is about
        named, signs = [Words(_key(parts[0])), sides[-1]], signs[-1:]
    if len(named) < 2:
        return None
    return Relation(key, tuple(named), tuple(_SIGNS.get(sign, sign) for sign in signs), text)


def _bracketed(text: str, key: str) -> Statement | None:
    is_set = text.startswith("\\{") and text.endswith("\\}")
    text = text[1:-2] + "}" if is_set else text
    if text[0] not in "([{" or text[-1] not in ")]}" or not balanced(text[1:-1]) or "\\begin" in text:
        return None
    inner = text[1:-1].replace("\u2009", ",")
    if text[0] == "{" and not is_set:  # LaTeX shows no such braces
        return _read(inner)
    parts = [part for each in split(inner, _SEMICOLON) for part in split(each, COMMA, grouped=False)]
    if len(parts) == 1:
        return _read(inner) if (text[0], text[-1]) in (("(", ")"), ("{", "}"), ("[", "]")) else None
    found = [_read(part) for part in parts]
    entries = tuple(entry for entry in found if entry is not None)
    if len(entries) < len(parts):
        return None
    return Items(key, text[0], text[-1], entries, f"\\{text[:-1]}\\}}" if is_set else text)


def _single(text: str, key: str) -> Statement | None:
    if (match := _CHOICE.fullmatch(text)) is not None and not _NAME.fullmatch(text[:0] or " "):
        rest = _read(match[2]) if match[2] else None
        letter = Words((match[1] or match[3]).lower())
        return letter if rest is None else Items(key, "choice", "", (letter, rest), text)
    if (match := re.fullmatch(r"(.+?)\s*\([a-zA-Z\s-]+\)", text)) is not None and (number := _number(match[1])) is not None:
        return number
    if (match := re.fullmatch(r"([-+]?[\d.,/ ]+\s*(?:[a-zA-Z]{2,}|[mgshl])\b)\s+([\d.,/ ]+\s*[a-zA-Z]+)", text)) is not None:
        parts = [_number(match[1]), _number(match[2])]
        if parts[0] and parts[1]:
            return Items(key, "", "", (parts[0], parts[1]), text)
    letters = re.fullmatch(r"[a-zA-Z]{1,3}", text) is not None
    if _WORD.fullmatch(text) and not letters and not _FUNCTION.match(text):
        return Words(re.sub(r"^(?:the|an?)(?=[^a-z])", "", text.lower()).replace(" ", "").strip("."), len(text.split()))
    units: frozenset[str] = frozenset("¤" if "¤" in text else ())
    if (match := _MEASURED.fullmatch(text)) is not None:
        found, _ = units_after(f" {match[2]}", "")
        if found and all(unit in KNOWN or len(unit) > 3 for unit in found):
            text, units = match[1], units | found
    bare = re.sub(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+|\b(?:sin|cos|tan|log|exp|gcd|lcm|max|min|mod)\b", "\\\\", text)
    if _PROSE.search(bare) or are_operators(re.findall(r"[a-zA-Z]{2,}", bare)):
        return None
    return Expression(key, text.replace("\u2009", "").replace("¤", ""), units)


def _ratio(key: str, match: re.Match[str]) -> Ratio:
    parts = [part.strip() for part in match[1].split(":")]
    clock = all(re.fullmatch(r"[0-5]\d", part) for part in parts[1:]) and len(parts[0]) < 3
    return Ratio(key, tuple(map(Fraction, parts)), (match[2] or "").lower(), clock)


def _number(text: str) -> Number | None:
    """Return the number that the whole of `text` states, with its unit; None for anything else."""
    if (based := _BASED.fullmatch(text)) is not None:
        base = based[2] or based[3]
        try:
            return Number(_key(text), Fraction(int(based[1], int(base))), based=based[1].lstrip("0"))
        except ValueError:
            return None
    if "\\frac" in text:
        text = _FRACTION.sub(lambda m: f"{m[1] + ' ' if m[1] else ''}{m[2] or m[3]}/{m[4] or m[5]}", text).strip()
    match = _NUMBER.match(text)
    if match is None:
        return None
    units, scale = units_after(match["rest"], match["currency"])
    if units is None or (match["before"] and match["sign"]) or (units & {"am", "pm"} and match["over"]):
        return None
    exponent = int(match["e"] or match["power"] or match["digit"] or 0)
    bottom = int(match["bottom"] or match["over"] or 1)
    if abs(exponent) > EXPONENT or bottom == 0 or (match["top"] and (int(match["top"]) >= bottom or "." in match["number"])):
        return None
    written = re.sub(r"[,\s\u2009]", "", match["number"]).rstrip(".")
    value = (Fraction(written) + Fraction(int(match["top"] or 0), bottom)) if match["top"] else Fraction(written) / bottom
    value *= Fraction(10) ** exponent * scale
    stated = "." in written or exponent != 0
    places = len(written.partition(".")[2]) - exponent if stated and not (match["top"] or match["over"]) and scale == 1 else None
    digits = len(written.replace(".", "").lstrip("0"))
    negative = "-" in (match["before"], match["sign"])
    return Number(_key(text), -value if negative else value, places, digits, match["percent"] is not None, units)
