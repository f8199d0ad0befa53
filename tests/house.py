"""Measure the structure and the wording of the repository: `python -m tests.house [--json] [--types]`.

Prints each measure with its bound. `tests/test_house.py` enforces the bounds, so that the measures only improve. `--types` adds
the type errors of the strict packages, which takes a minute.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from services.config.explain import keys as configuration_keys

ROOT = Path(__file__).parent.parent
SERVICES = ROOT / "services"
SUITE_SECONDS = (ROOT / "build" / "suite_seconds.json", ROOT / "tests" / "suite_seconds.json")
"""The file that `make test` writes, and a copy from a quiet machine, used where `make test` has not run."""
TICKET_TYPES = {"Ticket", "Tickets", "Claim"}
STORES = {"store", "_store"}
ODD_WORDS = ("anew", "amid", "amidst", "for want of", "to be had", "relieve", "relieves", "relieved", "heed", "heeds", "heeded")
"""English words that make readers of code and pages stumble. Parts of names count, too."""
_ODD = re.compile("|".join(rf"(?<![a-z]){words}(?![a-z])".replace(" ", r"\s+") for words in ODD_WORDS), re.IGNORECASE)


@dataclass(frozen=True)
class Measure:
    """A measure of the structure."""

    name: str
    value: float | None
    """None if it was not measured."""
    bound: float | None
    """The maximum; None if it is only reported."""
    where: str = ""
    """Where the value was found."""

    @property
    def kept(self) -> bool:
        """Whether it is within its bound."""
        return self.value is None or self.bound is None or self.value <= self.bound


def measure(types: bool = False) -> list[Measure]:
    """Measure everything; include type errors only with `types`."""
    structure = [files_a_folder(), duplicate_classes(), keys(), function_max(), services_lines(), ticket_files()]
    quick = [*structure, odd_words(), suite_s()]
    return [*quick, strict_errors() if types else Measure("strict_errors", None, 0, "measured with --types")]


def files_a_folder() -> Measure:
    """Return the largest number of files of any kind that stand directly in one folder of services."""
    folders = [SERVICES, *(path for path in SERVICES.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    counts = {folder: sum(path.is_file() for path in folder.iterdir()) for folder in folders}
    fullest = max(counts, key=lambda folder: (counts[folder], str(folder)))
    return Measure("files_a_folder", counts[fullest], 15, _shown(fullest))


def duplicate_classes() -> Measure:
    """Count the class names that are defined more than once, nested classes included."""
    names = Counter(node.name for _, tree in _trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    repeated = sorted(name for name, count in names.items() if count > 1)
    return Measure("duplicate_classes", len(repeated), 0, ", ".join(repeated))


def strict_errors() -> Measure:
    """Count pyright's errors in the packages that pyproject.toml lists as strict."""
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["strict"]
    command = [str(Path(sys.executable).with_name("pyright")), "--outputjson"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = Counter(
        _shown(Path(each["file"]))
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error" and any(Path(each["file"]).is_relative_to(ROOT / package) for package in strict)
    )
    return Measure("strict_errors", found.total(), 0, ", ".join(found))


def keys() -> Measure:
    """Count the keys of the configuration.

    Keys that several kinds of source share count once, as do those that `evaluation.sources` and `data.sources` have in common;
    sections do not count.
    """
    names = {
        re.sub(r"\[\](\([^)]*\))?", "", key.key).replace("evaluation.sources", "data.sources") for key in configuration_keys()
    }
    return Measure("keys", len(names), 200)


def function_max() -> Measure:
    """Return the length of the longest function body in lines, without its docstring."""
    lengths: dict[str, int] = {}
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                end = max((statement.end_lineno or 0 for statement in body), default=0)
                lengths[f"{_shown(path)}:{node.name}"] = end - body[0].lineno + 1 if body else 0
    longest = max(lengths, key=lambda name: (lengths[name], name))
    return Measure("function_max", lengths[longest], 51, longest)


def services_lines() -> Measure:
    """Count the lines of Python under services, blank ones included."""
    return Measure("services_lines", sum(len(path.read_text().splitlines()) for path in _modules()), None)


def ticket_files() -> Measure:
    """Count the modules that know of tickets.

    These define or import `Ticket` (the message), `Tickets` (the store's facet) or `Claim` (a ticket under lease), or use the
    facet as an attribute of something called `store` or `_store`. Keys and Lua, which name tickets only in text, do not count.
    """
    found = [_shown(path) for path, tree in _trees() if any(map(_knows_tickets, ast.walk(tree)))]
    return Measure("ticket_files", len(found), 40, ", ".join(found))


def odd_words() -> Measure:
    """Count the `ODD_WORDS` in the code of services and the pages of docs.

    Vendored files and docs/log.md, whose entries stay as they were written, do not count.
    """
    files = [*_modules(), *sorted(SERVICES.rglob("*.js")), *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{_shown(path)}:{line} {word}"
        for path in files
        if path != ROOT / "docs" / "log.md" and "vendor" not in path.parts
        for line, word in odd_words_of(path.read_text(encoding="utf-8"))
    ]
    return Measure("odd_words", len(found), 0, ", ".join(found))


def odd_words_of(text: str) -> list[tuple[int, str]]:
    """Return the odd words in a text, each with its line."""
    return [(text.count("\n", 0, found.start()) + 1, " ".join(found[0].split())) for found in _ODD.finditer(text)]


def suite_s() -> Measure:
    """Return the duration of the whole suite in seconds, if recorded."""
    for path in SUITE_SECONDS:
        if path.exists():
            return Measure("suite_s", json.loads(path.read_text())["suite_s"], 480, _shown(path))
    return Measure("suite_s", None, 480, "make test has not run")


def _knows_tickets(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(names=names):
            return any(alias.name in TICKET_TYPES for alias in names)
        case ast.ClassDef(name=name):
            return name in TICKET_TYPES
        case ast.Attribute(attr="tickets", value=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in STORES
    return False


@cache
def _modules() -> tuple[Path, ...]:
    return tuple(sorted(SERVICES.rglob("*.py")))


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    return ((path, _tree(path)) for path in _modules())


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def as_json(measures: list[Measure]) -> str:
    """Return the values by name, together with the bounds and the places."""
    values: dict[str, object] = {each.name: each.value for each in measures}
    bounds = {each.name: each.bound for each in measures if each.bound is not None}
    return json.dumps(values | {"bounds": bounds, "where": {each.name: each.where for each in measures if each.where}}, indent=2)


def as_table(measures: list[Measure]) -> str:
    """Return a line for each measure: name, value, bound and place."""
    lines = [("measure", "value", "bound", "where")]
    for each in measures:
        value = "-" if each.value is None else f"{each.value:,}"
        bound = "-" if each.bound is None else f"{each.bound:,}"
        lines.append((each.name, value, bound if each.kept else f"{bound} !", each.where))
    return "\n".join(f"{name:18}{value:>10}{bound:>8}  {where}".rstrip() for name, value, bound, where in lines)


def main(argv: list[str] | None = None) -> int:
    """Print the measures; return 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description="Measure the structure of the repository.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--types", action="store_true", help="count type errors, too; takes a minute")
    given = parser.parse_args(argv)
    measures = measure(given.types)
    print(as_json(measures) if given.json else as_table(measures))
    return 0 if all(each.kept for each in measures) else 1


if __name__ == "__main__":
    sys.exit(main())
