"""`math`: the answer of a reply equals the gold answer as mathematics.

answers.py finds the answer, statements.py reads it and the gold answer, and both are compared here by what they are. Whatever is
no plain number is parsed by math-verify, one side of a statement at a time, and compared by its values. An answer that is no
statement, cannot be evaluated or takes too long scores 0. A gold answer that is no statement is a fault of the data and raises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, cast

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from math_verify.grader import sympy_expr_eq, sympy_symbolic_eq
from sympy.core.function import AppliedUndef

from services.config.data import Source
from services.config.verifiers import MathConfig
from services.verifiers.base import Overtime
from services.verifiers.builtin.answers import final_statement, marked_answer
from services.verifiers.builtin.notation import same_units
from services.verifiers.builtin.statements import Expression, Items, Number, Ratio, Relation, Statement, Words, read

POWER = 512
"""An answer with a larger power or factorial than this and than the gold answer's does not count: it could take minutes."""
LATEX_CHARACTERS = 400
"""Longer LaTeX is not evaluated: parsing it takes seconds."""
ROUNDED_DIGITS = 6
"""Significant digits from which a decimal equals the exact value that it rounds."""
FLOAT_DIGITS = 15
"""Digits that a float has: those after them in a gold answer are noise."""
POINTS = [
    [sympy.Rational((-1) ** (i * t + t // 3) * (37 + 29 * i + 41 * t + 13 * i * t * t), 53 + 2 * i + 5 * t) for i in range(12)]
    for t in range(4)
]
"""Values of up to twelve unknowns at which expressions are compared: no two points are multiples of each other."""
EVALUATED_DIGITS = 60

_POWER = re.compile(r"(?:\^|\*\*)\s*[{(]?\s*[-+]?\s*(\d+)|(\d+)\s*!")
_TOWER = re.compile(r"(?:\^|\*\*)\s*(?:\{[^{}]*|\([^()]*|\w+\s*)(?:\^|\*\*)")
_LATEX = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=False, boxed="last"),
    )
]


class MathVerifier:
    """Scores 1 for an equal answer, else 0."""

    scores_overtime = True

    def __init__(self, config: MathConfig, source: Source) -> None:
        self._gold = lru_cache(maxsize=64)(read_gold)

    def score(self, reply: str, answer: str) -> float:
        """Return 1.0 or 0.0. Raises ValueError for a gold answer that is not mathematics."""
        gold = self._gold(answer)
        try:
            found = final_statement(reply)
            if found is None or largest_power(found.text) > max(POWER, largest_power(answer)):
                return 0.0
            return float(equal(gold, found))
        except (Exception, Overtime):  # whatever an answer causes in the libraries is a fault of that answer
            return 0.0


def read_gold(answer: str) -> Statement:
    """Return what a gold answer states. Raises ValueError if it states nothing."""
    found = final_statement(answer) if marked_answer(answer) is not None else read(answer) or final_statement(answer)
    if found is None or (isinstance(found, Expression) and not _parsed(found.latex)):
        raise ValueError(f"gold answer {answer!r} cannot be parsed as mathematics: use the verifier `exact`, or fix the data")
    return found


def equal(gold: Statement, found: Statement) -> bool:
    """Return whether two statements are equal, as wholes."""
    if gold.text == found.text:
        return True
    if isinstance(gold, Items) and gold.opening == "choice":
        return any(equal(entry, found) for entry in gold.entries)
    if isinstance(found, Items) and found.opening == "choice":
        return any(equal(gold, entry) for entry in found.entries)
    if isinstance(gold, Relation) or isinstance(found, Relation):
        return _equal_relations(gold, found)
    if isinstance(gold, Items) or isinstance(found, Items):
        return _equal_items(gold, found)
    if isinstance(gold, Words) or isinstance(found, Words):
        return False
    if isinstance(gold, Number) and isinstance(found, Number):
        return equal_numbers(gold, found)
    if isinstance(gold, Ratio) and isinstance(found, Ratio):
        return _equal_ratios(gold, found)
    if isinstance(gold, Number) and isinstance(found, Ratio):
        return len(found.parts) == 2 and found.parts[1] != 0 and gold.value == found.parts[0] / found.parts[1]
    if isinstance(gold, Ratio) and isinstance(found, Number):
        return equal(found, gold)
    return _equal_expressions(gold, found)


def equal_numbers(gold: Number, found: Number) -> bool:
    """Return whether values and units are equal. If only one is written as a percentage, `50%` equals both 50 and 0.5."""
    if not _same_units(gold, found):
        return False
    if bool(gold.based) != bool(found.based) and gold.text.partition("_")[0] == found.text.partition("_")[0]:
        return True
    if _near(gold, found):
        return True
    if found.percent != gold.percent:
        parts = (_hundredth(gold), found) if gold.percent else (gold, _hundredth(found))
        return _near(*parts)
    return False


def _hundredth(number: Number) -> Number:
    return Number("", number.value / 100, None if number.places is None else number.places + 2, number.digits)


def _same_units(gold: Number | Expression, found: Number | Expression) -> bool:
    ours, theirs = (one.units | ({"percent"} if one.percent else frozenset()) for one in (gold, found))
    return same_units(ours, theirs)


def _near(gold: Number, found: Number) -> bool:
    """Return whether two values are equal, or one rounds the other to the precision of the gold answer."""
    a, b = gold.value, found.value
    if a == b:
        return True
    if gold.places is not None and gold.digits >= ROUNDED_DIGITS:
        places = gold.places - max(0, gold.digits - FLOAT_DIGITS)
        return (found.places is None or found.places >= places or gold.digits > FLOAT_DIGITS) and _rounds(b, a, places)
    return gold.places is None and found.places is not None and found.digits >= ROUNDED_DIGITS and _rounds(a, b, found.places)


def _rounds(exact: Fraction, rounded: Fraction, places: int) -> bool:
    """Return whether a value rounds another one to so many decimal places."""
    return 2 * abs(exact - rounded) <= Fraction(10) ** -places


def _equal_ratios(gold: Ratio, found: Ratio) -> bool:
    if gold.half and found.half and gold.half != found.half:
        return False
    if gold.parts == found.parts:
        return True
    if len(gold.parts) != len(found.parts) or (gold.is_time and found.is_time) or gold.half or found.half:
        return False
    return all(a * found.parts[0] == b * gold.parts[0] for a, b in zip(gold.parts, found.parts, strict=True))


def _equal_items(gold: Statement, found: Statement) -> bool:
    if not isinstance(gold, Items) or not isinstance(found, Items):
        one, other = (gold, found) if isinstance(gold, Items) else (found, gold)
        assert isinstance(one, Items)
        if len(one.entries) == 1:
            return equal(one.entries[0], other)
        if _decimal_comma(gold, found):
            return True
        return isinstance(other, Expression) and _equal_in_library(gold, found)
    kinds = {gold.opening + gold.closing, found.opening + found.closing}
    ordered = bool({*"(["} & {gold.opening, found.opening})
    if ordered and len(kinds) == 2 and not ("" in kinds and not kinds & {"{}", "(]", "[)"}):
        return False
    left = list(found.entries)
    if not ordered and len({entry.text for entry in gold.entries}) == len(gold.entries):  # solutions, which may be repeated
        left = list({entry.text: entry for entry in left}.values())
    if len(gold.entries) != len(left):
        return False
    if ordered:
        return all(equal(a, b) for a, b in zip(gold.entries, left, strict=True))
    for entry in gold.entries:
        match = next((i for i, one in enumerate(left) if equal(entry, one)), None)
        if match is None:
            return False
        del left[match]
    return True


def _decimal_comma(gold: Statement, found: Statement) -> bool:
    """Return whether two texts are one decimal, written with a point and with a comma."""
    texts = [one.text.strip("¤€") for one in (gold, found)]
    return all(re.fullmatch(r"[-+]?\d*[.,]\d+", text) for text in texts) and texts[0].replace(",", ".") == texts[1].replace(
        ",", "."
    )


def _equal_relations(gold: Statement, found: Statement) -> bool:
    ours, theirs = _value(gold), _value(found)
    if ours is not None and theirs is not None:
        if ours[0] and theirs[0] and ours[0] != theirs[0]:
            return _equal_equations(gold, found)
        return equal(ours[1], theirs[1]) or (bool(ours[0] and theirs[0]) and _equal_equations(gold, found))
    ordered = [isinstance(one, Relation) and bool({*one.signs} & {"<", ">", "\\le", "\\ge"}) for one in (gold, found)]
    if isinstance(gold, Relation) and isinstance(found, Relation) and ordered[0] == ordered[1]:
        return _equal_equations(gold, found)
    return any(ordered) and _equal_in_library(ours[1] if ours else gold, theirs[1] if theirs else found)


def _value(statement: Statement) -> tuple[str, Statement] | None:
    """Return the name and the value of a statement: of an equation with a bare name, of a true one without an unknown, or itself.

    None for any other relation.
    """
    if not isinstance(statement, Relation):
        return "", statement
    if statement.assigned is not None:
        name, value = statement.assigned
        return "" if isinstance(statement.sides[0], Words) else name, value
    *others, last = statement.sides
    if not {*statement.signs} <= {"=", "\\approx"} or any(map(_unknowns, statement.sides)):
        return None
    return ("", last) if all(_constant_equal(one, last) for one in others) else None


def _constant_equal(one: Statement, value: Statement) -> bool:
    """Return whether a side of a chain equals its last one, which may be rounded; sides with different units are not compared."""
    if isinstance(one, Number) and isinstance(value, Number) and one.units and value.units and one.units != value.units:
        return True
    if equal(one, value) or equal(value, one):
        return True
    if not isinstance(value, Number) or value.places is None:
        return False
    number = one.value if isinstance(one, Number) else _numeric(one)
    return number is not None and _rounds(number, value.value, value.places)


def _numeric(statement: Statement) -> Fraction | None:
    try:
        (expression,) = _parsed(_latex(statement))
        return Fraction(str(sympy.N(expression, 30)))
    except (ValueError, TypeError):
        return None


def _unknowns(statement: Statement) -> bool:
    """Return whether a side has an unknown, or cannot be evaluated."""
    if isinstance(statement, Number | Ratio):
        return False
    if isinstance(statement, Items):
        return any(map(_unknowns, statement.entries))
    parsed = _parsed(_latex(statement))
    return not parsed or bool(getattr(parsed[0], "free_symbols", True))


def _equal_equations(gold: Statement, found: Statement) -> bool:
    """Return whether two relations of the same kind differ by a constant factor at most."""
    if not isinstance(gold, Relation) or not isinstance(found, Relation):
        return False
    chains = [_pairs(gold), _pairs(found)]
    return len(chains[0]) == len(chains[1]) and all(
        a[0] == b[0] and _proportional(a[1:], b[1:], a[0]) for a, b in zip(*chains, strict=True)
    )


def _pairs(relation: Relation) -> list[tuple[str, Statement, Statement]]:
    """Return the relations of a chain with the larger side first, in one order."""
    pairs: list[tuple[str, Statement, Statement]] = []
    for sign, left, right in zip(relation.signs, relation.sides, relation.sides[1:], strict=False):
        turned = sign in ("<", "\\le")
        pairs.append(({"<": ">", "\\le": "\\ge"}.get(sign, sign), right if turned else left, left if turned else right))
    return pairs if {*relation.signs} - {"<", "\\le"} else pairs[::-1]


def _proportional(gold: Sequence[Statement], found: Sequence[Statement], sign: str) -> bool:
    sides = [_parsed(_latex(side)) for side in (*gold, *found)]
    if not all(sides) or any(not isinstance(side[0], sympy.Expr) for side in sides):
        return equal(gold[0], found[0]) and equal(gold[1], found[1])
    a, b, c, d = (_as_scalar(side[0]) for side in sides)
    names = _names(a, b, c, d)
    if not names:
        return False
    factors: list[Any] = []
    for point in POINTS:
        ours, theirs = (_at(x, names, point) - _at(y, names, point) for x, y in ((a, b), (c, d)))
        if not (ours.is_number and theirs.is_number) or theirs == 0:
            return False
        factors.append(sympy.N(ours / theirs, 40))
    known = factors[0]
    if known == 0 or (sign != "=" and not (known.is_real and known > 0)):
        return False
    return all(_close(factor, known) for factor in factors)


def _equal_expressions(gold: Statement, found: Statement) -> bool:
    """Return whether two expressions, or an expression and a number, have equal values wherever they are evaluated."""
    if isinstance(gold, Number | Expression) and isinstance(found, Number | Expression) and not _same_units(gold, found):
        return False
    ours, theirs = _parsed(_latex(gold)), _parsed(_latex(found))
    if not ours or not theirs:
        return False
    a, b = (one[0].doit() if isinstance(one[0], sympy.MatrixExpr) else one[0] for one in (ours, theirs))
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(_equal_scalars(x, y) for x, y in zip(a.flat(), b.flat(), strict=True))
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return _equal_in_library(gold, found)
    for exact, number in ((a, found), (b, gold)):
        if isinstance(number, Number):
            return _equal_to_number(_as_scalar(exact), number)
    return _equal_scalars(a, b)


def _equal_to_number(expression: Any, number: Number) -> bool:
    """Return whether the value of an expression is a number, or is rounded by it."""
    wanted = sympy.Rational(number.value.numerator, number.value.denominator)
    if _names(expression):
        return sympy_symbolic_eq(expression, wanted)
    digits = EVALUATED_DIGITS + len(str(abs(number.value.numerator)))
    value = _at(expression, (), (), digits)
    if not value.is_number or value.is_real is False:
        return False
    if _close(value, wanted, digits - 20):
        return True
    if number.places is None or number.digits < ROUNDED_DIGITS or not value.is_finite:
        return False
    places = number.places - max(0, number.digits - FLOAT_DIGITS)
    return bool(2 * abs(value - wanted) <= sympy.Integer(10) ** -places)


def _equal_scalars(a: Any, b: Any) -> bool:
    a, b = _as_scalar(a), _as_scalar(b)
    names = _names(a, b)
    if names != _names(a) or names != _names(b):
        return sympy_symbolic_eq(a, b)
    try:
        values = [(_at(a, names, point), _at(b, names, point)) for point in (POINTS if names else POINTS[:1])]
        if all(x.is_number and y.is_number for x, y in values):
            return all(_close(x, y) for x, y in values)
    except (TypeError, ValueError, ArithmeticError):
        pass
    return sympy_symbolic_eq(a, b)


def _as_scalar(expression: Any) -> Any:
    """Return an expression with exact decimals and functions that have no definition as unknowns."""
    exact = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    called = {call: sympy.Symbol(str(call)) for call in expression.atoms(AppliedUndef)}
    return expression.xreplace({**exact, **called}) if exact or called else expression


def _names(*expressions: Any) -> list[str]:
    return sorted({symbol.name for expression in expressions for symbol in expression.free_symbols} - {"i"})


def _at(expression: Any, names: Sequence[str], point: Sequence[Any], digits: int = EVALUATED_DIGITS) -> Any:
    values = {symbol: sympy.I if symbol.name == "i" else point[names.index(symbol.name)] for symbol in expression.free_symbols}
    return sympy.N(expression.subs(values) if values else expression, digits)


def _close(a: Any, b: Any, digits: int = 35) -> bool:
    """Return whether two numbers are equal to so many digits."""
    if a == b:
        return True
    if not (a.is_finite and b.is_finite):
        return False
    return bool(abs(a - b) <= sympy.Float(10) ** -digits * max(abs(a), abs(b)) or max(abs(a), abs(b)) < sympy.Float(10) ** -80)


def _equal_in_library(gold: Statement, found: Statement) -> bool:
    """Compare sets and inequalities, which math-verify turns into sets."""
    ours, theirs = _parsed(_latex(gold)), _parsed(_latex(found))
    if not ours or not theirs or any(isinstance(one[0], sympy.Expr) for one in (ours, theirs)):
        return False
    return sympy_expr_eq(ours[0], theirs[0], 12, 15, allow_set_relation_comp=True)


def _latex(statement: Statement) -> str:
    if isinstance(statement, Number):
        return f"\\frac{{{statement.value.numerator}}}{{{statement.value.denominator}}}"
    return statement.latex if isinstance(statement, Expression | Items | Relation) else statement.text


@lru_cache(maxsize=64)
def _parsed(latex: str) -> list[Any]:
    """Return what math-verify makes of LaTeX: a list of one, or of none. The caller has a time limit, so its own is off."""
    if len(latex) > LATEX_CHARACTERS:
        return []
    read_latex = cast("Callable[..., list[Any]]", parse)
    return read_latex(
        f"\\boxed{{{latex}}}", _LATEX, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )


def largest_power(text: str) -> float:
    """Return the largest exponent or factorial that the text states; infinity if an exponent has one of its own."""
    if _TOWER.search(text):
        return math.inf
    return max((float(power or factorial) for power, factorial in _POWER.findall(text)), default=0.0)
