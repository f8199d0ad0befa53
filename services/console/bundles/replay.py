"""Implements `grpo replay-step`, which repeats a stage of a recorded step and compares the results.

Guarantees: it needs no Redis, no fleet and no GPU; it ends with exit code 1 and the first difference if there is one.
"""

from __future__ import annotations

import asyncio
import tempfile
import tomllib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Literal

from services.config import RunConfig
from services.config.load import ConfigError, validate
from services.console.bundles import stages, trainer_stages
from services.console.bundles.stages import Compared
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.printable import print_json, printable
from services.dataprep.planning.plan import PlanningError
from services.operations.bundles import format as bundles
from services.operations.bundles.format import Bundle, BundleError, BundleFile
from services.protocol import codec
from services.verifiers.base import VerifierFailure

Stage = Literal["score", "settle", "pack", "loss", "train"]
SHOWN = 5  # differences in the output


def replay(
    path: Path, stage: Stage, tolerance: float, run_code: bool, save: Path | None, against: Path | None, as_json: bool
) -> int:
    """Replay a stage. Return exit code 1 if the results differ from the recorded ones."""
    try:
        file = bundles.read(path)
        config = _config(file.bundle, path, stage, run_code)
        compared, notes = asyncio.run(_collect(file, config, stage, run_code, save, against))
    except (BundleError, ConfigError, codec.CorruptMessage, PlanningError, VerifierFailure) as error:
        raise ConsoleError(printable(error), EXIT_CONFIG) from None
    except (KeyError, IndexError, ValueError, TypeError) as error:  # plans, headers and payloads that do not fit together
        raise ConsoleError(f"{path} is inconsistent: {printable(repr(error))}", EXIT_CONFIG) from None
    if not compared:
        raise ConsoleError(f"{path} has nothing to compare stage {stage} with: {'; '.join(notes) or 'it was not trained'}")
    differ = [one for one in compared if one.differs(tolerance)]
    if as_json:
        first = {"where": differ[0].where, "was": differ[0].was, "now": differ[0].now} if differ else None
        print_json({
            "bundle": str(path), "run": file.bundle.run, "step": file.bundle.step, "stage": stage, "compared": len(compared),
            "different": len(differ), "first": first, "notes": notes,
        })  # fmt: skip
    else:
        _show(file, stage, compared, differ, notes)
    return EXIT_FAILED if differ else EXIT_OK


def _config(bundle: Bundle, path: Path, stage: Stage, run_code: bool) -> RunConfig:
    """Return the run's configuration. Refuse one that names code, unless that may run."""
    try:
        tree: dict[str, Any] = tomllib.loads(bundle.config)
    except tomllib.TOMLDecodeError as error:
        raise BundleError(f"{path} has no valid configuration: {error}") from None
    config = validate(tree, str(path), before=lambda config: config)
    if ":" in config.loss.policy and stage in ("loss", "train") and not run_code:
        raise BundleError(
            f"{path}: loss.policy = {config.loss.policy!r} is code: trust the bundle, have that module here, and add --run-code"
        )
    return config


async def _collect(
    file: BundleFile, config: RunConfig, stage: Stage, run_code: bool, save: Path | None, against: Path | None
) -> tuple[list[Compared], list[str]]:
    compared, notes = list[Compared](), list[str]()
    with tempfile.TemporaryDirectory(prefix="grpo-replay-") as work:
        if stage == "score" and file.has(bundles.MODEL):
            model = config.model.model_copy(update={"path": str(file.unpack(bundles.MODEL, Path(work)))})
            config = config.model_copy(update={"model": model})
        async for one in _stage(file, config, stage, run_code, save, against):
            if isinstance(one, str):
                notes.append(one)
            else:
                compared.append(one)
    return compared, notes


async def _stage(
    file: BundleFile, config: RunConfig, stage: Stage, run_code: bool, save: Path | None, against: Path | None
) -> AsyncIterator[Compared | str]:
    found: Iterable[Compared | str]
    match stage:
        case "score":
            async for one in stages.score(file.bundle, config, run_code):
                yield one
            return
        case "settle":
            found = stages.settled(file.bundle, config)
        case "pack":
            found = stages.packed(file.bundle, config)
        case _:
            found = trainer_stages.trained(file, config, stage == "loss", save, against)
    for each in found:
        yield each


def _show(file: BundleFile, stage: Stage, compared: list[Compared], differ: list[Compared], notes: list[str]) -> None:
    for note in notes:
        print(f"note: {printable(note)}")
    what = f"step {file.bundle.step} of run {printable(file.bundle.run)}, stage {stage}: {len(compared):,} values compared"
    if not differ:
        print(f"{what}, all equal")
        return
    print(f"{what}, {len(differ):,} differ; the first:")
    for one in differ[:SHOWN]:
        print(f"  {printable(one)}")
    for name, was in file.bundle.versions.items():
        if (now := _version(name)) and now != was:
            print(f"  note: {printable(name)} was {printable(was)}, is {now} here")


def _version(package: str) -> str:
    import importlib.metadata
    import sys

    if package == "python":
        return sys.version.split()[0]
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
