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
import tokenize
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
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
"""Tokens that make no line a line of code."""
_PRIVATE = re.compile(r"_[^_]\w*")
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
    quick = [each() for each in QUICK]
    suite = [of_suite("suite_s", 300), of_suite("suite_cpu_s", 480)]
    return [*quick, *suite, strict_errors() if types else Measure("strict_errors", None, 0, "measured with --types")]


def services_code() -> Measure:
    """Count the lines of code of services."""
    return Measure("services_code", sum(map(code_lines, _modules())), 34_680)


def console_code() -> Measure:
    """Count the lines of code of the command line."""
    return Measure("console_code", sum(code_lines(path) for path in _modules() if "console" in path.parts), 5_895)


def files() -> Measure:
    """Count the Python files of services."""
    return Measure("files", len(_modules()), 440)


@cache
def code_lines(path: Path) -> int:
    """Count the lines of a file that hold a token which is neither a comment nor part of a docstring (also of an attribute)."""
    lines = set[int]()
    docstrings = {
        line
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def two_way_folders() -> Measure:
    """Count the pairs of folders of services that import each other, wherever in a file an import stands."""
    arrows = {(here.parent, there.parent) for here, there in _imports() if here.parent != there.parent}
    pairs = sorted(f"{_shown(a)} and {_shown(b)}" for a, b in arrows if a < b and (b, a) in arrows)
    return Measure("two_way_folders", len(pairs), 0, "; ".join(pairs))


def lone_small_files() -> Measure:
    """Count the files of services with fewer than 30 lines of code that at most one other file imports.

    A package's `__init__.py` and a program's `__main__.py` do not count.
    """
    importers: dict[Path, set[Path]] = {path: set() for path in _modules()}
    for here, there in _imports():
        importers[there].add(here)
    small = [
        _shown(path)
        for path, users in importers.items()
        if len(users) < 2 and code_lines(path) < 30 and path.name not in ("__init__.py", "__main__.py")
    ]
    return Measure("lone_small_files", len(small), 0, ", ".join(small))


def fmt_skips() -> Measure:
    """Count the statements of services that the formatter is told to skip."""
    found = [_shown(path) for path in _modules() for line in path.read_text().splitlines() if "# fmt: skip" in line]
    return Measure("fmt_skips", len(found), 20, ", ".join(sorted(set(found))))


def changelog_bytes() -> Measure:
    """Return the size of CHANGELOG.md."""
    return Measure("changelog_bytes", (ROOT / "CHANGELOG.md").stat().st_size, 10_000)


def private_accesses() -> Measure:
    """Count the places in tests that reach for a private name of something else than `self`, patches by name included."""
    counts = Counter(
        _shown(path) for path in (ROOT / "tests").rglob("*.py") for node in ast.walk(_tree(path)) if _is_private_access(node)
    )
    return Measure("private_accesses", counts.total(), 170, ", ".join(f"{path} {n}" for path, n in counts.most_common()))


def _is_private_access(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return False
        case ast.Attribute(attr=name):
            return bool(_PRIVATE.fullmatch(name))
        case ast.Call(func=ast.Name(id="setattr" | "getattr") | ast.Attribute(attr="setattr" | "delattr"), args=args):
            texts = [each.value for each in args[:2] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            return any(_PRIVATE.fullmatch(text.rpartition(".")[2]) for text in texts)
    return False


def _imports() -> Iterator[tuple[Path, Path]]:
    """Yield each file of services with each other file of services that it imports."""
    for here, tree in _trees():
        for node in ast.walk(tree):
            names = list[str]()
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for there in map(_module_of, names):
                if there is not None and there != here:
                    yield here, there


def _module_of(name: str) -> Path | None:
    """Return the file of services that an imported name is or belongs to."""
    for known in (name, name.rpartition(".")[0]):
        path = ROOT.joinpath(*known.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if known.startswith("services.") and file.is_file():
                return file
    return None


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
    return Measure("keys", len(names), 145)


def ticket_files() -> Measure:
    """Count the modules that know of tickets.

    These define or import `Ticket` (the message), `Tickets` (the store's facet) or `Claim` (a ticket under lease), or use the
    facet as an attribute of something called `store` or `_store`. Keys and Lua, which name tickets only in text, do not count.
    """
    found = [_shown(path) for path, tree in _trees() if any(map(_knows_tickets, ast.walk(tree)))]
    return Measure("ticket_files", len(found), 40, ", ".join(found))


def odd_words() -> Measure:
    """Count the `ODD_WORDS` in the code of services and the pages of docs.

    Vendored files do not count.
    """
    files = [*_modules(), *sorted(SERVICES.rglob("*.js")), *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{_shown(path)}:{line} {word}"
        for path in files
        if "vendor" not in path.parts
        for line, word in odd_words_of(path.read_text(encoding="utf-8"))
    ]
    return Measure("odd_words", len(found), 0, ", ".join(found))


def odd_words_of(text: str) -> list[tuple[int, str]]:
    """Return the odd words in a text, each with its line."""
    return [(text.count("\n", 0, found.start()) + 1, " ".join(found[0].split())) for found in _ODD.finditer(text)]


def of_suite(name: str, bound: float) -> Measure:
    """Return a figure of the last whole `make test`, if recorded: its duration, or its processor time, in seconds."""
    for path in SUITE_SECONDS:
        if path.exists() and (value := json.loads(path.read_text()).get(name)) is not None:
            return Measure(name, value, bound, _shown(path))
    return Measure(name, None, bound, "make test has not run")


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


QUICK = (
    services_code, console_code, files, two_way_folders, keys, lone_small_files, fmt_skips, changelog_bytes, private_accesses,
    duplicate_classes, ticket_files, odd_words,
)  # fmt: skip
"""What `tests/test_house.py` holds to its bounds."""


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
