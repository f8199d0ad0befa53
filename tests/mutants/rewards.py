"""`python -m tests.mutants.rewards [NAME]`: break each rule of the rewards and of tool calls in turn.

Exits with code 1 if no case notices one.
A mutant replaces one text in one module while it is imported; the cases of some kinds are then tried on it (tests/cases).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from tests.support.preloading.starter import PLAIN

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """A rule, broken."""

    module: str
    """Below `services`."""
    rule: str
    old: str
    new: str
    kind: str
    """Of the cases that are to notice it."""


MATH, ANSWERS, STATEMENTS = (f"verifiers.builtin.{name}" for name in ("math", "answers", "statements"))
CALLS, JSON, XML = "chat.calls", "chat.json_calls", "chat.xml_calls"
MUTANTS = {
    mutant.rule: mutant
    for mutant in (
        Mutant(MATH, "names of unknowns count", "ours[0] != theirs[0]", "False", "equation"),
        Mutant(
            MATH, "false equations have no value", "if all(_constant_equal(one, last) for one in others)", "if True", "equation"
        ),
        Mutant(
            MATH,
            "equations differ by a factor",
            "return all(_close(factor, known) for factor in factors)",
            "return True",
            "equation",
        ),
        Mutant(MATH, "inequalities have a direction", 'sign != "=" and not', "False and not", "equation"),
        Mutant(
            STATEMENTS, "a value belongs to a bare name", "return _NAME.fullmatch(latex) is not None", "return True", "equation"
        ),
        Mutant(MATH, "the precision of the gold answer", "gold.digits >= ROUNDED_DIGITS", "True", "number"),
        Mutant("verifiers.builtin.notation", "units count", "if not gold or not found or", "if True or", "number"),
        Mutant(STATEMENTS, "bases count", "int(based[1], int(base))", "int(based[1], 36)", "number"),
        Mutant(MATH, "halves of the day", "gold.half and found.half and gold.half != found.half", "False", "number"),
        Mutant(
            STATEMENTS, "mixed numbers", r"(?:\s+(?P<top>\d+)\s?/\s?(?P<bottom>\d+)|", r"(?:(?P<top>Z)(?P<bottom>Z)|", "number"
        ),
        Mutant(STATEMENTS, "exponents", r"(?:[eE](?P<e>[-+]?\d+)|", r"(?:Z(?P<e>[-+]?\d+)|", "number"),
        Mutant(
            MATH, "order counts in tuples", 'ordered = bool({*"(["} & {gold.opening, found.opening})', "ordered = False", "list"
        ),
        Mutant(MATH, "brackets count", "if ordered and len(kinds) == 2", "if False", "list"),
        Mutant(MATH, "all entries count", "if len(gold.entries) != len(left):", "if False:", "list"),
        Mutant(ANSWERS, "joined boxes are a list", "_JOINT.fullmatch(reply[end:begin]) is None", "True", "which"),
        Mutant(ANSWERS, "a tag is a mark", 'place, found = at, ("tag", match[1].strip())', "pass", "which"),
        Mutant(ANSWERS, "the last statement", "stated[-1].end()", "stated[0].end()", "which"),
        Mutant(
            ANSWERS,
            "a phrase is read as a whole",
            "while i < len(tokens):\n            step",
            "while False:\n            step",
            "unmarked",
        ),
        Mutant(ANSWERS, "a correction", "sentence = match[1]\n", "pass\n", "unmarked"),
        Mutant(ANSWERS, "a restatement", "_RESTATED.split(sentence)[-1]", "_RESTATED.split(sentence)[0]", "unmarked"),
        Mutant(STATEMENTS, "dates are no numbers", r"\d{4}-\d\d?-\d\d?|", "", "unmarked"),
        Mutant("chat.reply", "the reply follows the reasoning", 'if ends else (text, "")', 'if ends else ("", text)', "which"),
        Mutant(
            "chat.reply", "a prompt may open the reasoning", "[opening + text for text in", "[text for text in", "reasoning that"
        ),
        Mutant(
            "chat.reply",
            "marks may be special tokens",
            "return {\n        number: mark",
            "return {} and {\n        number: mark",
            "special tokens",
        ),
        Mutant("verifiers.judge", "replies that ended early", "if reason not in COMPLETE:", "if False:", "judge"),
        Mutant("verifiers.judge", "a judge's reasoning", "self._read(reply_of(text), count)", "self._read(text, count)", "judge"),
        Mutant(
            "dataprep.prompts.rows",
            "whole floats are integers",
            "str(int(number)) if whole else",
            "repr(number) if whole else",
            "number as answer",
        ),
        Mutant("dataprep.prompts.rows", "no exponents", 'format(Decimal(str(number)), "f")', "str(number)", "number as answer"),
        Mutant("dataprep.prompts.rows", "gaps are no answers", "not math.isfinite(value)", "False", "missing answer"),
        Mutant("groups.advantages", "equal rewards", "EQUAL_SHARE * np.abs(r).max(axis=-1)", "0", "nearly equal"),
        Mutant(CALLS, "text is text without a type", "if _fits(check, key, _UNTYPED):", "if False:", "argument type"),
        Mutant(CALLS, "numbers come before text", "(*plain, text, *readings)", "(text, *readings)", "argument type"),
        Mutant(CALLS, "12.0 is no integer", "type(value) is int", "type(value) in (int, float)", "argument type"),
        Mutant(CALLS, "lists have brackets", 'isinstance(value, list) and text[0] not in "[("', "False", "argument type"),
        Mutant(CALLS, "faults belong to arguments", "return error.absolute_path[0] == key", "return False", "argument type"),
        Mutant(CALLS, "NaN is no number", 'raise ValueError(f"{constant} is not JSON")', "pass", "argument type"),
        Mutant(CALLS, "constants of JSON", "if node.id in _OF_JSON else", "if False else", "pythonic"),
        Mutant(CALLS, "only offered tools", "if name not in names(tools):", "if False:", "offered name"),
        Mutant(XML, "a value may end a call", r"(?!(?:(?!<tool_call>|<function=).)*?</parameter>)", "", "embedded tag"),
        Mutant(
            XML, "glm's first tag", "if BEGIN not in text:\n        untagged", "if False:\n        untagged", "missing opening"
        ),
        Mutant(JSON, "hermes' first tag", "if BEGIN not in text and END in text:", "if False:", "missing opening"),
        Mutant(JSON, "mistral's first tag", "if MISTRAL not in text and (begin", "if not text and (begin", "missing opening"),
        Mutant(JSON, "deepseek's first tag", "if BEGIN_CALLS not in text:", "if False:", "missing opening"),
        Mutant(JSON, "answers in JSON", " and fields.keys() <= FIELDS", "", "json answer"),
        Mutant("chat.pythonic", "lists in prose", "if not offered:\n", "if False:\n", "pythonic"),
    )
}
"""By rule."""


class Breaking(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module with its mutation."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        file = ROOT / "services" / f"{mutant.module.replace('.', '/')}.py"
        super().__init__(f"services.{mutant.module}", str(file))

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return how to load the module; None for any other."""
        return importlib.machinery.ModuleSpec(fullname, self, origin=self.path) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        """Compile the broken source."""
        source = Path(self.path).read_text(encoding="utf-8")
        assert source.count(self._mutant.old) == 1, f"{self._mutant.rule}: the text to replace is not there once"
        return compile(source.replace(self._mutant.old, self._mutant.new), self.path, "exec")


def notices(rule: str) -> bool:
    """Return whether a case fails while a rule is broken, in a process of its own."""
    command = [sys.executable, "-m", "tests.mutants.rewards", rule]
    environ = os.environ | {PLAIN: "1"}  # a process that has imported the module before would not import the broken one
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 1


def main() -> int:
    """Break the named rule and try the cases, or break all in turn."""
    if len(sys.argv) == 1:
        unnoticed = [rule for rule in MUTANTS if not notices(rule)]
        print(f"{len(MUTANTS) - len(unnoticed)} of {len(MUTANTS)} broken rules are noticed", *unnoticed, sep="\n")
        return bool(unnoticed)
    mutant = MUTANTS[sys.argv[1]]
    breaking = Breaking(mutant)
    try:
        breaking.get_code(mutant.module)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 2
    sys.meta_path.insert(0, breaking)
    from tests.cases.runner import DATA, MORE, outcomes

    return int(any(not outcome.right for folder in (DATA, MORE) for outcome in outcomes(folder, mutant.kind)))


if __name__ == "__main__":
    sys.exit(main())
