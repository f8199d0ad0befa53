"""The guards of the functions, read from their code, and the library without one of them. Pure.

A guard is the fence of a function, a condition, an operand of a condition that rejects a call, an operand of a `math.max` or
`math.min`, or a command that deletes something.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from services.store.functions import library

_RETURNS = re.compile(r"^(\s*)(if|elseif) (.+) then( return\b.*)?$")
_REFUSES = re.compile(r"^\s*(return\b|if .* then return\b)")
_FENCED = re.compile(r"^register_(leader|trainer)\('")
_DELETES = re.compile(
    r"^\s*(redis\.call|call_over)\((\w+, )?'(HDEL|DEL|UNLINK|ZREM|ZREMRANGEBYSCORE|ZREMRANGEBYRANK|LREM|XDEL|XACK|XTRIM)'.*\)$"
    r"|^\s*without\(.*\)$"
)
_UNFENCED = """local function register_unfenced(name, expected, body, grows)
  local all = {'fence', NATURAL}
  for i = 1, #expected do all[#all + 1] = expected[i] end
  register(name, all, body, grows)
end
"""
_BOUND = re.compile(r"math\.(max|min)\(")


@dataclass(frozen=True)
class Guard:
    """A guard and its replacement when removed."""

    place: str
    """The function or helper that contains it."""
    line: str
    without: str
    number: int
    """Line of the library, counted from 0."""

    @property
    def name(self) -> str:
        """Return its unique name: where it is, its line, and the line without it."""
        return f"{self.place}: {self.line.strip()} => {self.without.strip()}"

    def removed(self) -> tuple[str, str]:
        """Return name and code of the library without the guard."""
        name, code = library()
        lines = code.splitlines()
        assert lines[self.number] == self.line
        lines[self.number] = self.without
        other = f"grpo_{hashlib.sha256(f'{self.number}{self.without}'.encode()).hexdigest()[:12]}"
        code = "\n".join(lines).replace("local function register_leader(", f"{_UNFENCED}local function register_leader(", 1)
        return other, code.replace(f"name={name}", f"name={other}").replace(f"'{name}'", f"'{other}'")


def guards() -> list[Guard]:
    """Return all guards in the order of the code."""
    return list(_guards(library()[1].splitlines()))


def _guards(lines: list[str]) -> Iterator[Guard]:
    place = ""
    for number, line in enumerate(lines):
        if begins := re.match(r"^(?:local function (\w+)|register\w*\('(\w+)'|FIRST\.(\w+) =)", line):
            place = next(name for name in begins.groups() if name)
        code = line.partition(" -- ")[0]
        if code.lstrip().startswith("--"):
            continue
        if found := _RETURNS.match(code):
            indent, keyword, condition, returned = found.groups()
            following = lines[number + 1] if number + 1 < len(lines) else ""
            rejects = bool(returned) or bool(_REFUSES.match(following))
            for left in ("false", *_without_one(condition)) if rejects else ("true",):
                yield Guard(place, line, f"{indent}{keyword} {left} then{returned or ''}", number)
        if found := _FENCED.match(code):
            yield Guard(place, line, f"register_unfenced('{code[found.end() :]}", number)
        if _DELETES.match(code):
            yield Guard(place, line, f"-- {code.strip()}", number)
        for bound in _BOUND.finditer(code):
            for kept in ("a", "b"):
                yield Guard(
                    place, line, f"{code[: bound.start()]}(function(a, b) return {kept} end)({code[bound.end() :]}", number
                )


def _without_one(condition: str) -> Iterator[str]:
    """Yield the condition without each of its operands."""
    for operator in (" or ", " and "):
        parts = _split(condition, operator)
        if len(parts) > 1:
            yield from (operator.join([*parts[:i], *parts[i + 1 :]]) for i in range(len(parts)))
            return


def _split(condition: str, operator: str) -> list[str]:
    """Split at an operator outside brackets."""
    parts, depth, start = list[str](), 0, 0
    for at, letter in enumerate(condition):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and condition.startswith(operator, at):
            parts.append(condition[start:at])
            start = at + len(operator)
    return [*parts, condition[start:]]
