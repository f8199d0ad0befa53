"""Finds rows of a sample log: by an expression, sorted, a page at a time.

Guarantees: memory holds the narrow columns of the log, about 140 bytes a row, and the long ones of one file at a time; the files
of a log never change, so what was read of one is kept. A search that reads texts stops after its time limit and says how much
of the log it has searched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from services.operations.samples.columns import NAMES, NARROW, SCHEMA, TEXTS, ExpressionError
from services.operations.samples.folder import Part, SampleFolder

ROW = "__row"
LONG = tuple(name for name in SCHEMA.names if name not in NARROW)
SORTS = tuple(name for name in NAMES if name in NARROW)
TEXT_LIMIT_S = 10.0  # of a search that reads texts


@dataclass(frozen=True)
class SamplePage:
    """The answer of a search."""

    total: int
    """Rows that match, among those that were searched."""
    rows: list[dict[str, Any]]
    """The page."""
    searched: int
    """Rows that were searched: fewer than `of` if time ran out."""
    of: int
    """Rows of the log."""


@dataclass
class Search:
    """A sample log, with what was read of its files."""

    folder: SampleFolder
    _narrow: dict[str, Any] = field(default_factory=dict[str, Any])
    _joined: tuple[tuple[str, ...], Any] = ((), None)

    @classmethod
    def of(cls, path: Path) -> Search:
        """Return the log in the folder `path`, which may be empty."""
        return cls(SampleFolder(path))

    def find(
        self, where: str = "", sort: str = "", reverse: bool = False, offset: int = 0, limit: int = 20,
        columns: Sequence[str] = SCHEMA.names, limit_s: float = TEXT_LIMIT_S, given_up: Callable[[], bool] = lambda: False,
    ) -> SamplePage:  # fmt: skip
        """Return the rows that match `where`, sorted by the column `sort`, lowest first; unsorted the newest first.

        Rows whose step a restore has undone are left out unless the expression has `undone`. Once `given_up()`, no more texts are
        read. Raises `ExpressionError`.
        """
        if sort and sort not in SORTS:
            raise ExpressionError(f"cannot sort by {sort!r}: the columns are {', '.join(SORTS)}")
        until = time.monotonic() + limit_s

        def over() -> bool:
            return time.monotonic() > until or given_up()

        return self.folder.reading(lambda parts: self._find(parts, where, sort, reverse, offset, limit, columns, over))

    def _find(
        self, parts: Sequence[Part], where: str, sort: str, reverse: bool, offset: int, limit: int, columns: Sequence[str],
        over: Callable[[], bool],
    ) -> SamplePage:  # fmt: skip
        expression, read = _condition(where, self.folder.position.begun)
        read |= {"incarnation", "step", ROW, *([sort] if sort else [])}
        table, starts = self._table(parts)
        long, table = sorted(read.intersection(LONG)), table.select(sorted(read.difference(LONG)))
        rows, searched = table, table.num_rows
        try:
            if long:
                rows, searched = self._with_texts(parts, starts, table, expression, long, over)
            elif expression is not None:
                rows = table.filter(expression)
        except pa.ArrowException as error:
            raise ExpressionError(f"{where!r} cannot be evaluated: {str(error).splitlines()[0]}") from None
        picked = self._page(rows, sort, reverse, offset, limit)
        return SamplePage(rows.num_rows, self._read(parts, starts, picked, columns), searched, table.num_rows)

    def _table(self, parts: Sequence[Part]) -> tuple[Any, list[int]]:
        """Return the narrow columns of all parts with the row's number, and the number of each part's first row."""
        names = tuple(part.path.name for part in parts)
        starts, at = list[int](), 0
        for part in parts:
            starts.append(at)
            at += part.rows
        if self._joined[0] != names or self._joined[1] is None:
            tables = [self._narrow.get(part.path.name) or part.read(NARROW) for part in parts]
            self._narrow = dict(zip(names, tables, strict=True))
            empty = pa.schema([SCHEMA.field(name) for name in SCHEMA.names if name in NARROW]).empty_table()
            table = pa.concat_tables(tables).combine_chunks() if tables else empty
            self._joined = names, table.append_column(ROW, pa.array(range(table.num_rows), pa.int64()))
        return self._joined[1], starts

    def _with_texts(
        self,
        parts: Sequence[Part],
        starts: Sequence[int],
        table: Any,
        expression: Any,
        long: Sequence[str],
        over: Callable[[], bool],
    ) -> tuple[Any, int]:
        """Filter with long columns, the newest file first, until `over()`. Return the rows and how many were searched."""
        found, searched = [table.slice(0, 0)], 0
        for part, start in reversed(list(zip(parts, starts, strict=True))):
            if over():
                break
            narrow = table.slice(start, part.rows)
            texts = part.read(long)
            for name in long:
                narrow = narrow.append_column(name, texts[name])
            found.append(narrow.filter(expression).drop_columns(list(long)))
            searched += part.rows
        return pa.concat_tables(reversed(found)), searched

    def _page(self, rows: Any, sort: str, reverse: bool, offset: int, limit: int) -> list[int]:
        """Return the numbers of the rows of a page. Only those before its end are sorted."""
        if not sort:
            numbers = rows[ROW]  # ascending
            first = offset if reverse else max(0, rows.num_rows - offset - limit)
            size = limit if reverse else max(0, rows.num_rows - offset) - first
            found = numbers.slice(first, size).to_pylist()
            return found if reverse else found[::-1]
        import pyarrow.compute as pc

        keys = [(sort, "descending" if reverse else "ascending"), (ROW, "descending")]
        known = rows.filter(pc.field(sort).is_valid())
        order = pc.select_k_unstable(known, min(offset + limit, known.num_rows), sort_keys=keys)
        page: list[int] = known[ROW].take(order.slice(offset, limit)).to_pylist()
        if len(page) == limit:
            return page
        unknown: list[int] = rows.filter(pc.field(sort).is_null())[ROW].to_pylist()[::-1]
        first = max(0, offset - known.num_rows)
        return page + unknown[first : first + limit - len(page)]

    def _read(
        self, parts: Sequence[Part], starts: Sequence[int], rows: Sequence[int], columns: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return whole rows by their numbers, in that order, reading each file once and only the row groups that have them."""
        wanted: dict[int, list[int]] = {}
        place = 0
        for row in sorted(rows):
            while place + 1 < len(starts) and starts[place + 1] <= row:
                place += 1
            wanted.setdefault(place, []).append(row)
        found: dict[int, dict[str, Any]] = {}
        for number, members in wanted.items():
            with parts[number].opened() as file:
                first = starts[number]
                for group in range(file.metadata.num_row_groups):
                    size = file.metadata.row_group(group).num_rows
                    inside = [row for row in members if first <= row < first + size]
                    if inside:
                        table = file.read_row_group(group, columns=list(columns))
                        if inside[-1] - inside[0] < len(inside):  # adjacent: no need for pyarrow.compute
                            picked = table.slice(inside[0] - first, len(inside)).to_pylist()
                        else:
                            picked = table.take(pa.array([row - first for row in inside])).to_pylist()
                        found.update(zip(inside, (_plain(dict.fromkeys(columns) | row) for row in picked), strict=True))
                    first += size
        return [found[row] for row in rows if row in found]


def _condition(where: str, begun: Mapping[str, int]) -> tuple[Any, set[str]]:
    """Return the condition for rows that match `where`, None if all do, and the columns it reads. Raises `ExpressionError`."""
    if not where.strip() and len(begun) < 2:  # nothing was undone: no need for pyarrow.compute, which takes long to import
        return None, set()
    from services.operations.samples.where import Where, undone_rows

    undone = undone_rows(begun)
    if not where.strip():
        return ~undone, set()
    asked = Where(where, undone)
    return asked.expression if asked.reads_undone else asked.expression & ~undone, asked.columns


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for JSON: scores as a mapping."""
    return row | {"scores": dict(row["scores"] or [])} if "scores" in row else row


__all__ = ["SORTS", "TEXTS", "ExpressionError", "SamplePage", "Search"]
