"""The files of a sample log, `<run>/samples/part-<first batch>-<last batch>.parquet`, oldest first.

Guarantees: files are complete, because each gets its name only once it is on disk; where a tracker was killed between writing a
merged file and deleting those that it was merged from, only the merged one counts; a damaged file is left out and named.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from services.operations.samples.columns import FORMAT, SCHEMA

SAMPLES = "samples"
"""Folder of the log below the run's folder."""
METADATA = b"grpo"
STATUS = "log.json"
T = TypeVar("T")
_NAME = re.compile(r"part-(\d{8})-(\d{8})\.parquet")


class DamagedPart(Exception):
    """The contents of a file cannot be read, although its footer could be. The message says why."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


class LogPosition(msgspec.Struct):
    """What a log contains up to the end of a file; stored in the file's metadata."""

    incarnation: int = 0
    step: int = -1
    """Last step whose groups are logged."""
    begun: dict[str, int] = {}
    """Incarnation -> its first step: later ones of earlier incarnations were undone."""
    format: int = FORMAT
    share: float = 1.0
    """`samples.share` when the file was written."""


class LogStatus(msgspec.Struct):
    """What the log lacks, stored in `log.json`."""

    missed: dict[str, int] = {}
    """Outcome -> groups that were to be logged and are not: the tracker was gone or too slow."""
    first_step: int = 0
    """Step at which the log begins."""
    counted: dict[str, int] | None = None
    """Outcome -> how many of `missed` are in the counts of the current Redis; None: all, in files of earlier versions."""


@dataclass(frozen=True)
class Part:
    """A file of the log."""

    path: Path
    first: int
    last: int
    rows: int
    size_bytes: int
    position: LogPosition = field(default_factory=LogPosition)

    @contextlib.contextmanager
    def opened(self) -> Generator[Any]:
        """Open the file; reading it in this block raises `DamagedPart` for contents that are damaged."""
        try:
            with cast("Any", pq.ParquetFile)(self.path) as file:  # half the CPU time of read_table
                yield file
        except (OSError, pa.ArrowInvalid) as error:
            if isinstance(error, OSError) and error.errno:  # of the file system, not of pyarrow
                raise
            raise DamagedPart(self.path.name, " ".join(str(error).split())) from None

    def read(self, names: Sequence[str] = SCHEMA.names) -> Any:
        """Return a table with those columns, in the order of the schema; one that the file does not have yet is null.

        Raises `DamagedPart`.
        """
        arrow: Any = pa
        with self.opened() as file:
            table = file.read(columns=list(names))
        fields: list[Any] = [SCHEMA.field(name) for name in SCHEMA.names if name in names]
        there: set[str] = set(table.column_names)
        return arrow.table(
            [table[field.name] if field.name in there else arrow.nulls(table.num_rows, field.type) for field in fields],
            schema=arrow.schema(fields),
        )

    def rows_at(self, numbers: Sequence[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
        """Return rows by their numbers, reading only the row groups that have them; a column that the file lacks is None.

        Raises `DamagedPart`.
        """
        found, first = dict[int, dict[str, Any]](), 0
        with self.opened() as file:
            for group in range(file.num_row_groups):
                end = first + file.metadata.row_group(group).num_rows
                inside = [number for number in numbers if first <= number < end]
                if inside:
                    table = file.read_row_group(group, columns=list(columns)).take([number - first for number in inside])
                    rows = [dict.fromkeys(columns) | row for row in table.to_pylist()]
                    found.update(zip(inside, rows, strict=True))
                first = end
        return found

    @property
    def batches(self) -> int:
        """Return the number of batches that it was merged from."""
        return self.last - self.first + 1


@dataclass
class SampleFolder:
    """A log on disk. `refresh` reads what is new; files never change."""

    path: Path
    parts: list[Part] = field(default_factory=list[Part])
    damaged: dict[str, str] = field(default_factory=dict[str, str])
    """Name of a file that cannot be read -> why."""

    def refresh(self) -> list[Part]:
        """Return the parts that count, oldest first, reading the metadata of new ones."""
        known = {part.path.name: part for part in self.parts}
        found = [self._read(path, first, last, known) for path, first, last in current(self.path)]
        self.parts = [part for part in found if part is not None]
        return self.parts

    def reading(self, read: Callable[[list[Part]], T]) -> T:
        """Return the result of `read` for the parts that count. Starts again if a tracker has merged or deleted some meanwhile,
        or if one is damaged, which is then left out.
        """
        while True:
            parts = self.refresh()
            try:
                return read(parts)
            except DamagedPart as error:
                self.damaged[error.name] = str(error)
            except FileNotFoundError:
                if self.refresh() == parts:
                    raise

    def _read(self, path: Path, first: int, last: int, known: dict[str, Part]) -> Part | None:
        if path.name in self.damaged:
            return None
        if path.name in known:
            return known[path.name]
        try:
            metadata = pq.read_metadata(path)
            raw: bytes = metadata.metadata[METADATA] if METADATA in (metadata.metadata or ()) else b"{}"
            position = msgspec.json.decode(raw, type=LogPosition)
            if position.format != FORMAT:
                raise pa.ArrowInvalid(f"its format is {position.format}, this version reads {FORMAT}")
            return Part(path, first, last, metadata.num_rows, path.stat().st_size, position)
        except FileNotFoundError:
            return None  # merged or deleted meanwhile
        except (OSError, pa.ArrowInvalid, msgspec.MsgspecError) as error:
            self.damaged[path.name] = str(error)
            return None

    @property
    def rows(self) -> int:
        """Return the number of completions."""
        return sum(part.rows for part in self.parts)

    @property
    def position(self) -> LogPosition:
        """Return the position of the log."""
        return self.parts[-1].position if self.parts else LogPosition()

    def status(self) -> LogStatus:
        """Return what the log lacks."""
        try:
            return msgspec.json.decode((self.path / STATUS).read_bytes(), type=LogStatus)
        except (OSError, msgspec.MsgspecError):
            return LogStatus()


def current(folder: Path) -> list[tuple[Path, int, int]]:
    """Return the files that count, with their first and last batch, in order."""
    found = [(path, int(name[1]), int(name[2])) for path in folder.glob("part-*.parquet") if (name := _NAME.fullmatch(path.name))]
    found.sort(key=lambda one: (one[1], -one[2]))
    kept: list[tuple[Path, int, int]] = []
    for path, first, last in found:
        if not kept or last > kept[-1][2]:
            kept.append((path, first, last))
    return kept


def name_of(first: int, last: int) -> str:
    """Return the name of a file of these batches."""
    return f"part-{first:08d}-{last:08d}.parquet"


def superseded(folder: Path) -> Sequence[Path]:
    """Return files that a merged one contains, and files that were never finished."""
    kept = {path for path, _, _ in current(folder)}
    return [path for path in (*folder.glob("part-*.parquet"), *folder.glob(".part-*")) if path not in kept]
