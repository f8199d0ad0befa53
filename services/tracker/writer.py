"""Writes the files of a sample log.

Guarantees: a file gets its name only once it is on disk, with the log's position in it, so a process that is killed at any point
leaves whole files that say what they contain; small files are merged, and the oldest are deleted when there are more than `keep`
completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from services.operations.samples.columns import SCHEMA
from services.operations.samples.folder import (
    METADATA,
    STATUS,
    DamagedPart,
    LogPosition,
    LogStatus,
    Part,
    SampleFolder,
    name_of,
    superseded,
)
from services.runtime.atomic_folders import replace, sync
from services.tracker.rows import column

log = structlog.get_logger()

MERGED = 16  # files of similar size that are merged into one
MERGED_BYTES = 64 << 20  # maximum size of a merged file, which is read whole
PART_OF_KEPT = 16  # a file has at most this part of all completions, so that deleting the oldest deletes no more
ROW_GROUP_BYTES = 2 << 20  # of rows that are read together for a page, before compression
_TEXTS = ["group", "outcome", "reason", "source", "prompt", "generator", "payload", "notes"]
_REPEATED = [*_TEXTS, "logprobs.list.element", "gaps.list.element"]
"""Columns with a dictionary. Without one, zstd makes tokens and the other numbers smaller, and in less time."""
_PACKED = {"compression": "zstd", "compression_level": 1, "use_dictionary": _REPEATED}


class PartWriter:
    """Appends to the log in `path`. One process at a time."""

    def __init__(self, path: Path, keep: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for left in superseded(path):
            left.unlink(missing_ok=True)
        self._keep, self.folder = keep, SampleFolder(path)
        self.folder.refresh()
        for name in self.folder.damaged:
            self._set_aside(name)

    def write(self, columns: Mapping[str, Sequence[Any]], position: LogPosition) -> Part:
        """Write one batch, all columns of `SCHEMA`, as a file. `columns`: arrays, or sequences of values."""
        number = self.folder.parts[-1].last + 1 if self.folder.parts else 1
        table = pa.table({name: column(name, columns[name]) for name in SCHEMA.names}, schema=SCHEMA)
        return self._put(table, number, number, position)

    def read(self, part: Part, names: Sequence[str] = SCHEMA.names) -> Any:
        """Return columns of a part, or None if they are damaged: then it no longer counts."""
        try:
            return part.read(names)
        except DamagedPart as error:
            log.warning("a file of the sample log is damaged, and left out from now on", file=str(part.path), error=str(error))
            self.folder.parts.remove(part)
            self._set_aside(part.path.name)
            return None

    def tidy(self) -> None:
        """Merge the newest files if enough of them are of similar size, and delete the oldest beyond `keep`."""
        parts = self.folder.parts
        while len(parts) >= MERGED and self._alike(parts[-MERGED:]):
            merged = parts[-MERGED:]
            tables = [self.read(part) for part in merged]
            if any(table is None for table in tables):
                continue
            table = pa.concat_tables(tables)
            part = self._put(table, merged[0].first, merged[-1].last, merged[-1].position)
            for old in merged:
                old.path.unlink(missing_ok=True)
            parts[:] = [*parts[: -MERGED - 1], part]
        while len(parts) > 1 and self.folder.rows - parts[0].rows >= self._keep:
            parts.pop(0).path.unlink(missing_ok=True)

    def note(self, status: LogStatus) -> None:
        """Write what the log lacks."""
        replace(self.folder.path / STATUS, msgspec.json.encode(status))

    def _set_aside(self, name: str) -> None:
        """Give a damaged file a name outside the log."""
        (self.folder.path / name).rename(self.folder.path / f"damaged-{name}")

    def _alike(self, parts: Sequence[Part]) -> bool:
        small = sum(part.size_bytes for part in parts) <= MERGED_BYTES
        few = sum(part.rows for part in parts) * PART_OF_KEPT <= self._keep
        digits = {(part.position.share, len(f"{part.batches - 1:x}") if part.batches > 1 else 0) for part in parts}
        return small and few and len(digits) == 1

    def _put(self, table: Any, first: int, last: int, position: LogPosition) -> Part:
        path = self.folder.path / name_of(first, last)
        fresh = path.with_name(f".{path.name}")
        table = table.replace_schema_metadata({METADATA: msgspec.json.encode(position)})
        rows = max(1, ROW_GROUP_BYTES * table.num_rows // max(1, table.nbytes))
        pq.write_table(table, fresh, row_group_size=rows, **_PACKED)
        sync(fresh)
        fresh.rename(path)
        sync(path.parent)
        part = Part(path, first, last, table.num_rows, path.stat().st_size, position)
        self.folder.parts.append(part)
        return part
