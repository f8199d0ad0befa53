"""The language of `grpo samples --where`: comparisons of columns, joined by `and`, `or` and `not`. Pure.

Guarantees: nothing is executed; text in any form but those below raises `ExpressionError`, which names it and the columns.
Forms: `reward < 0.2`, `2 <= step < 40`, `source in ('math', 'code')`, `'sorry' in completion`, `matches(completion, '^I')`,
`reward is None`, `score.math > 0`, `step - oldest > 2`, `truncated`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from services.operations.samples.columns import FLAGS, NAMES, TEXTS, UNDONE, ExpressionError

MOST_CHARACTERS = 2000
MOST_NODES = 200
HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which UTF-8 cannot hold."""


def _quotient(a: Any, b: Any) -> Any:
    return a / b


COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _quotient,
}  # fmt: skip


class Where:
    """An expression, ready for `pyarrow`: `expression`, and the `columns` that it reads."""

    def __init__(self, text: str, undone: Any) -> None:
        """`undone`: the expression that the name `undone` stands for. Raises `ExpressionError`."""
        self.columns, self._text, self._undone = set[str](), text, undone
        if len(text) > MOST_CHARACTERS:
            raise ExpressionError(f"the expression has {len(text)} characters: at most {MOST_CHARACTERS} can be used")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"{text!r} is not an expression: {getattr(error, 'msg', error)}") from None
        if sum(1 for _ in ast.walk(tree)) > MOST_NODES:
            raise ExpressionError(f"the expression has more than {MOST_NODES} parts: shorten it")
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and HALF.search(node.value):
                raise ExpressionError(f"{node.value!r} has half of a surrogate pair, which is not text: leave it out")
        self.reads_undone = any(isinstance(node, ast.Name) and node.id == UNDONE for node in ast.walk(tree))
        self.expression = self._condition(tree)

    def _condition(self, node: ast.expr) -> Any:
        match node:
            case ast.BoolOp(op, values):
                joined = [self._condition(value) for value in values]
                result = joined[0]
                for each in joined[1:]:
                    result = result & each if isinstance(op, ast.And) else result | each
                return result
            case ast.UnaryOp(ast.Not(), operand):
                return ~self._condition(operand)
            case ast.Compare(left, operators, rights):
                result = None
                for operation, right in zip(operators, rights, strict=True):
                    each = self._comparison(left, operation, right)
                    result, left = each if result is None else result & each, right
                return result
            case ast.Call(
                func=ast.Name(id="matches"), args=[ast.expr() as column, ast.Constant(value=str(pattern))], keywords=[]
            ):
                return self._matches(column, pattern)
            case ast.Name(id=name) if name in FLAGS:
                return self._name(name)
            case ast.Constant(value=bool(value)):
                return pc.scalar(value)
            case _:
                raise self._refused(node, "a condition")

    def _comparison(self, left: ast.expr, operation: ast.cmpop, right: ast.expr) -> Any:
        match operation, left, right:
            case ast.Is() | ast.IsNot(), _, ast.Constant(value=None):
                found = self._value(left).is_null()
                return found if isinstance(operation, ast.Is) else ~found
            case ast.In() | ast.NotIn(), _, ast.Tuple(elements) | ast.List(elements) | ast.Set(elements):
                values = [self._constant(element) for element in elements]
                self._alike(left, values)
                try:
                    found = self._value(left).isin(values)
                except pa.ArrowException:
                    raise self._refused(right, "values of one kind") from None
            case ast.In() | ast.NotIn(), ast.Constant(value=str(text)), ast.Name(id=name):
                found = pc.match_substring(self._text_column(name, right), text)
            case _ if type(operation) in COMPARISONS:
                if isinstance(right, ast.Constant):
                    self._alike(left, [right.value])
                if isinstance(left, ast.Constant):
                    self._alike(right, [left.value])
                return COMPARISONS[type(operation)](self._value(left), self._value(right))
            case _:
                raise self._refused(right, "a comparison")
        return found if isinstance(operation, ast.In) else ~found

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=ast.Name(id="score"), attr=attribute):
                return self._score(attribute)
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="score"), attr=verifier), attr=part):
                return self._score(f"{verifier}.{part}")
            case ast.Subscript(value=ast.Name(id="score"), slice=ast.Constant(value=str(name))):
                return self._score(name)
            case ast.BinOp(left, operation, right) if type(operation) in ARITHMETIC:
                for side in (left, right):
                    if isinstance(side, ast.Name) and side.id in TEXTS | FLAGS:
                        raise ExpressionError(f"{side.id} is not a number: it cannot be calculated with")
                given = [self._value(side).cast(pa.float64()) for side in (left, right)]
                return ARITHMETIC[type(operation)](*given)
            case _:
                return pc.scalar(self._constant(node))

    def _constant(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return self._fitting(value)
            case ast.UnaryOp(ast.USub(), ast.Constant(value=(int() | float()) as value)):
                return self._fitting(-value)
            case _:
                raise self._refused(node, "a value")

    def _fitting(self, value: Any) -> Any:
        if isinstance(value, int) and abs(value) >= 2**62:
            raise ExpressionError(f"{value} is too large a number")
        return value

    def _name(self, name: str) -> Any:
        if name == UNDONE:
            self.columns.update(("incarnation", "step"))
            return self._undone
        if name not in NAMES:
            hint = ": write score.NAME for the score of a verifier" if name in ("score", "scores") else ""
            raise ExpressionError(f"no column {name!r}{hint}; the columns are {', '.join(NAMES)} and score.NAME")
        self.columns.add(name)
        return pc.field(name)

    def _score(self, name: str) -> Any:
        self.columns.add("scores")
        return pc.map_lookup(pc.field("scores"), pa.scalar(name), "first")

    def _text_column(self, name: str, node: ast.expr) -> Any:
        if name not in TEXTS:
            self._name(name)  # raises with the names of the columns if it is none
            raise ExpressionError(f"{name} is not a text: `'…' in` works for {', '.join(sorted(TEXTS))}")
        return self._value(node)

    def _matches(self, column: ast.expr, pattern: str) -> Any:
        if not isinstance(column, ast.Name):
            raise self._refused(column, "the column of matches()")
        found = self._text_column(column.id, column)
        try:
            pc.match_substring_regex(pa.scalar(""), pattern)
        except pa.ArrowInvalid as error:
            raise ExpressionError(f"{pattern!r} is not a regular expression: {error}") from None
        return pc.match_substring_regex(found, pattern)

    def _alike(self, node: ast.expr, values: list[Any]) -> None:
        """Refuse a comparison of a column with values of another kind."""
        if not isinstance(node, ast.Name) or node.id not in NAMES:
            return
        wanted, kind = (
            (str, "a text") if node.id in TEXTS else (bool, "True or False") if node.id in FLAGS else ((int, float), "a number")
        )
        for value in values:
            if value is not None and (not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool))):
                raise ExpressionError(f"{node.id} is {kind}: it cannot be compared with {value!r}")

    def _refused(self, node: ast.expr, wanted: str) -> ExpressionError:
        part = ast.get_source_segment(self._text.strip(), node) or self._text
        return ExpressionError(
            f"{part!r} cannot be used as {wanted}: compare columns with values, as in reward < 0.2 and step > 40, "
            "'text' in completion, source in ('a', 'b'), reward is None, or matches(completion, 'pattern')"
        )


def undone_rows(begun: Mapping[str, int]) -> Any:
    """Return the expression for rows whose step a restore has undone. `begun`: incarnation -> its first step."""
    result = pc.scalar(False)
    firsts = {int(incarnation): step for incarnation, step in begun.items()}
    for incarnation in sorted(firsts):
        later = [step for other, step in firsts.items() if other > incarnation]
        if later:
            result = result | ((pc.field("incarnation") == incarnation) & (pc.field("step") >= min(later)))
    return result
