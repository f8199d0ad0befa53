"""Searches a sample log with DuckDB: by an SQL condition, sorted, a page at a time.

Guarantees: a condition is one expression over the columns of the log and a few functions. It reads no other files and no
settings, and takes at most `MEMORY` and `LIMIT_S`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import duckdb

from services.operations.samples.columns import NAMES, SCHEMA, SORTS, UNDONE
from services.operations.samples.folder import Part, SampleFolder

MOST_CHARACTERS = 2000
LIMIT_S = 10.0
INTERRUPT_S = 0.02
MEMORY = "1GB"
SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": MEMORY,
    "temp_directory": "",
    "threads": 2,
    "python_enable_replacements": False,
    "autoload_known_extensions": False,
    "autoinstall_known_extensions": False,
}
FUNCTIONS = frozenset(
    [
        *("+", "-", "*", "/", "//", "%", "^", "**", "abs", "round", "floor", "ceil", "sqrt", "ln", "log", "exp"),
        *("greatest", "least", "isnan", "isfinite", "~~", "!~~", "~~*", "!~~*", "contains", "starts_with", "ends_with"),
        *("regexp_matches", "lower", "upper", "length", "len", "json_extract", "json_extract_string", "->", "->>"),
        *("list_value", "list_contains", "list_sum", "list_avg", "list_min", "list_max", "array_extract", "map_contains"),
    ]
)
"""Functions and operators that a condition may use."""
_SORTS = ", ".join(f'"{name}"' for name in SORTS)
_FORMS = frozenset(
    ["BETWEEN", "CASE", "CAST", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "OPERATOR", "TYPE"]
)
"""Kinds of nodes in DuckDB's syntax trees that a condition may have; others are subqueries, windows, parameters, …"""


class ExpressionError(ValueError):
    """A condition, or the name of a column, that cannot be used."""


@dataclass(frozen=True)
class SamplePage:
    """The answer of a search."""

    total: int
    """Rows that match."""
    rows: list[dict[str, Any]]
    """The page."""
    of: int
    """Rows of the log."""


@dataclass
class Search:
    """A sample log that can be searched, by one thread at a time."""

    folder: SampleFolder
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)

    @classmethod
    def of(cls, path: Path) -> Search:
        """Return the log in the folder `path`, which may be empty."""
        return cls(SampleFolder(path))

    def find(
        self,
        where: str = "",
        sort: str = "",
        reverse: bool = False,
        offset: int = 0,
        limit: int = 20,
        columns: Sequence[str] = SCHEMA.names,
        limit_s: float = LIMIT_S,
    ) -> SamplePage:
        """Return the rows that match `where`, sorted by the column `sort`, lowest first; unsorted the newest first.

        Rows whose step a restore has undone are left out unless the expression has `undone`. Raises `ExpressionError`.
        """
        if sort and sort not in SORTS:
            raise ExpressionError(f"cannot sort by {sort!r}: the columns are {', '.join(SORTS)}")
        condition, used = _condition(where)
        if UNDONE not in used:
            condition = f"({condition}) AND NOT {UNDONE}"
        falling = "DESC" if bool(sort) == reverse else "ASC"
        order = f'"{sort}" {falling} NULLS LAST, file DESC, number DESC' if sort else f"file {falling}, number {falling}"

        def search(parts: list[Part]) -> SamplePage:
            if not parts:
                return SamplePage(0, [], 0)
            total, places = self._places(parts, condition, order, offset, limit, limit_s)
            return SamplePage(total, _read(parts, places, columns), self.folder.rows)

        return self.folder.reading(search)

    def interrupt(self) -> None:
        """End the search that another thread is making: it raises `ExpressionError`."""
        self._ended.set()

    def _places(
        self, parts: Sequence[Part], condition: str, order: str, offset: int, limit: int, limit_s: float
    ) -> tuple[int, list[tuple[str, int]]]:
        """Return the number of rows that match and, of those on the page, the files and their places in them."""
        done = threading.Event()
        with duckdb.connect(config=SETTINGS) as connection:
            clock = threading.Thread(target=self._watch, args=(connection, done, limit_s))
            clock.start()
            try:
                rows = log_of(connection, parts, undone_rows(self.folder.position.begun))
                rows.filter(condition).project(f"file, number, {_SORTS}").create("matching")
                found = connection.table("matching")
                [(total,)] = found.aggregate("count(*)").fetchall()
                return total, found.order(order).project("file, number").limit(limit, offset).fetchall()
            except duckdb.InterruptException:
                raise ExpressionError(f"the search took longer than {limit_s:g} s: narrow it, e.g. with step > 900") from None
            except duckdb.Error as error:
                for part in parts:
                    part.read()  # raises an error that explains it, if a file is damaged or gone
                raise ExpressionError(f"the condition cannot be evaluated: {_first_line(error)}") from None
            finally:
                done.set()
                self._ended.set()
                clock.join()
                self._ended.clear()

    def _watch(self, connection: duckdb.DuckDBPyConnection, done: threading.Event, limit_s: float) -> None:
        """End a search after its time, or once it is interrupted. An interruption between two statements has no effect."""
        self._ended.wait(limit_s)
        while not done.wait(INTERRUPT_S):
            connection.interrupt()


def log_of(connection: duckdb.DuckDBPyConnection, parts: Sequence[Part], undone: str = "false") -> duckdb.DuckDBPyRelation:
    """Return the rows of these files, with all columns, `score`, `undone`, and each row's `file` and its `number` in it.

    The connection can read no other files afterwards. `undone`: the condition for rows whose step a restore has undone.
    """
    files = ", ".join(map(quoted, parts))
    connection.execute(f"SET allowed_paths = [{files}]; SET enable_external_access = false; SET lock_configuration = true")
    rows = connection.sql(f"FROM read_parquet([{files}], union_by_name = true, filename = 'file', file_row_number = true)")
    lacking = "".join(f", NULL AS {name}" for name in SCHEMA.names if name not in rows.columns)  # all files are older
    return rows.project(f"*, file_row_number AS number, ({undone}) AS {UNDONE}{lacking}").project("*, scores AS score")


def quoted(part: Part) -> str:
    """Return a file's path as SQL writes it."""
    path = str(part.path).replace("'", "''")
    return f"'{path}'"


def undone_rows(begun: Mapping[str, int]) -> str:
    """Return the condition for rows whose step a restore has undone. `begun`: incarnation -> its first step."""
    firsts = {int(incarnation): step for incarnation, step in begun.items()}
    later = {life: [step for other, step in firsts.items() if other > life] for life in sorted(firsts)}
    cases = [f"(incarnation = {life} AND step >= {min(steps)})" for life, steps in later.items() if steps]
    return f"coalesce({' OR '.join(cases)}, false)" if cases else "false"


def _condition(where: str) -> tuple[str, set[str]]:
    """Return a condition that is checked, and the columns that it uses. Raises `ExpressionError`."""
    if not where.strip():
        return "true", set()
    if len(where) > MOST_CHARACTERS:
        raise ExpressionError(f"the condition has {len(where)} characters: at most {MOST_CHARACTERS} can be used")
    try:
        where = _quoted(where)
    except UnicodeEncodeError:
        raise ExpressionError(f"{where!r} has half of a surrogate pair, which is not text: leave it out") from None
    try:
        with duckdb.connect(config=SETTINGS) as connection:
            expression = duckdb.SQLExpression(where)  # raises unless it is a single one
            parse = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT {where}"]).fetchall()
    except duckdb.Error as error:
        raise ExpressionError(f"{where!r} is not a condition: {_first_line(error)}") from None
    [[tree]] = parse
    columns = set[str]()
    for node in _nodes(json.loads(tree)["statements"][0]["node"]["select_list"]):
        kind, name = node["class"], node.get("function_name", "")
        if kind not in _FORMS:
            raise ExpressionError(f"{where!r} has a {kind.lower()}: only columns, values, comparisons and functions can be used")
        if kind == "FUNCTION" and name not in FUNCTIONS:
            raise ExpressionError(f"{name} cannot be used: the functions are {', '.join(sorted(FUNCTIONS))}")
        if kind == "COLUMN_REF":
            columns.add(node["column_names"][0].lower())
    if unknown := sorted(columns - {*SCHEMA.names, UNDONE, "score"}):
        raise ExpressionError(f"no column {unknown[0]!r}; the columns are {', '.join(NAMES)} and score.NAME")
    return str(expression), columns


def _quoted(where: str) -> str:
    """Return a condition in which `group`, a word of SQL, is the name of a column."""
    text = where.encode()
    for start, kind in reversed(duckdb.tokenize(where)):  # places in bytes
        if kind == duckdb.token_type.keyword and text[start : start + 5].lower() == b"group":
            text = text[:start] + b'"group"' + text[start + 5 :]
    return text.decode()


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the expressions in a syntax tree."""
    if isinstance(tree, dict):
        node = cast("dict[str, Any]", tree)
        if "class" in node:
            yield node
        tree = list(node.values())
    for each in cast("list[Any]", tree) if isinstance(tree, list) else ():
        yield from _nodes(each)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].removesuffix(":")


def _read(parts: Sequence[Part], places: Sequence[tuple[str, int]], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return whole rows by their places, in that order."""
    numbers: dict[str, list[int]] = {}
    for file, number in places:
        numbers.setdefault(file, []).append(number)
    found = {str(part.path): part.rows_at(numbers[str(part.path)], columns) for part in parts if str(part.path) in numbers}
    return [_plain(found[file][number]) for file, number in places]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for JSON: scores as a mapping."""
    return row | {"scores": dict(row["scores"] or [])} if "scores" in row else row
