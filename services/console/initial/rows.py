"""Implements `grpo rows`: writes the prompts of environments that bring their own data, for the sources that name them.

Guarantees: a file is written whole or not at all; an existing one is kept.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from services.config import RunConfig, load
from services.config.data import FileSource
from services.config.environments import VerifiersEnvironment
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.printable import print_json, printable
from services.environment.programs.pool import ProgramPool
from services.environment.programs.process import ProgramFailed, ProgramProcess, ProgramUnusable

PAGE = 100
"""Rows requested at a time; a ticket's row has at most 64 KiB, and a worker's reply 64 MiB."""


class WantedRows(NamedTuple):
    """A source whose file is to be written."""

    source: FileSource
    environment: VerifiersEnvironment
    evaluation: bool


async def rows(file: Path, overrides: Sequence[str], limit: int | None, as_json: bool) -> int:
    """Write the missing files of the sources, with at most `limit` rows each. Raises `ConsoleError`."""
    wanted = list(_wanted(load(file, overrides)))
    if not wanted:
        raise ConsoleError(
            f'{file}: no prompt source of kind jsonl names an environment of kind "verifiers": set `environment` of one',
            EXIT_CONFIG,
        )
    found: list[dict[str, Any]] = []
    for each in wanted:
        path = Path(each.source.path)
        count = None if _exists(each.source) else await _write(path, each, limit)
        found.append({"path": str(path), "source": each.source.name, "environment": each.environment.name, "rows": count})
        if not as_json:
            told = f"{printable(path)} exists: kept" if count is None else f"wrote {printable(path)}: {count:,} rows"
            print(f"{told} (environment {each.environment.name})", flush=True)
    if as_json:
        print_json({"files": found})
    return EXIT_OK


def _wanted(config: RunConfig) -> Iterator[WantedRows]:
    for evaluation, sources in ((False, config.data.sources), (True, config.evaluation.sources)):
        for source in sources:
            environment = next((each for each in config.environments if each.name == source.environment), None)
            if isinstance(environment, VerifiersEnvironment) and isinstance(source, FileSource) and source.kind == "jsonl":
                yield WantedRows(source, environment, evaluation)


def _exists(source: FileSource) -> bool:
    return source.on_hub or Path(source.path).exists()


async def _write(path: Path, wanted: WantedRows, limit: int | None) -> int:
    part = path.with_name(f"{path.name}.part")
    count = 0
    pool = ProgramPool(wanted.environment.model_copy(update={"processes": 1}))
    try:
        with part.open("wb") as out:
            await pool.start()
            async with pool.process() as process:
                async for row in _read(process, wanted, limit):
                    named = {wanted.source.prompt_field: row.pop("prompt"), wanted.source.answer_field: row.pop("answer")}
                    out.write(msgspec.json.encode({**named, **row}) + b"\n")
                    count += 1
        if not count:
            raise ConsoleError(f"environment {wanted.environment.name!r} has no rows: change its options", EXIT_CONFIG)
        os.replace(part, path)
    except (ProgramUnusable, ProgramFailed) as error:
        raise ConsoleError(str(error), EXIT_CONFIG) from None
    except OSError as error:
        raise ConsoleError(
            f'path of source "{wanted.source.name}" = {str(path)!r}: {error.strerror}: correct it', EXIT_CONFIG
        ) from None
    finally:
        await pool.close()
        part.unlink(missing_ok=True)
    return count


async def _read(process: ProgramProcess, wanted: WantedRows, limit: int | None) -> AsyncIterator[dict[str, Any]]:
    start, size = 0, PAGE
    while limit is None or start < limit:
        size = PAGE if limit is None else min(PAGE, limit - start)
        asked = {"start": start, "count": size, "evaluation": wanted.evaluation, "limited": limit is not None}
        page: list[dict[str, Any]] = (await process.do("rows", "rows", asked)).value
        for row in page:
            yield row
        if len(page) < size:
            return
        start += size
