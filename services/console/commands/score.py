"""The command `grpo score`: completions of a file, scored with all verifiers of a configuration."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from services.chat.errors import DataError
from services.config import RunConfig, load
from services.console.code import copied
from services.console.display.text import cell, show, table
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.offline import Offline
from services.console.options import File, Json, Overrides
from services.console.printable import print_json, printable
from services.verifiers.base import Job, Scores, VerifierFailure, combine, solved
from services.verifiers.scoring import Scoring

SHOWN = 20
"""Completions that the table has; --json has all."""
TEXT_CHARACTERS = 40


@dataclass
class ScoredCompletion:
    """One completion, or the reason why it has no score."""

    where: str
    completion: str
    reward: float | None = None
    scores: dict[str, float] = field(default_factory=dict[str, float])
    solved: bool | None = None
    note: dict[str, Any] = field(default_factory=dict[str, Any])
    failure: str = ""


async def score(
    file: File,
    overrides: Overrides = None,
    completions: Annotated[
        Path | None,
        typer.Option(metavar="JSONL", help="Completions to score, a JSON object per line; default: each source's first answer."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Score completions with the verifiers of a configuration.

    No run is started. Each line of the file has `completion` (a text, or a list of texts for a group) and either `row`,
    the number of a data row from 0, or the fields of a row. With several prompt sources it also has `source`. Exit code 1: a
    completion has no score.
    """
    config = load(file, overrides or [])
    offline = Offline(config)
    groups = list(_groups(offline, completions))
    for _, job in groups:
        if not config.verified(job.source):
            raise ConsoleError(
                f"source {job.source!r} has no verifier: its environment scores it during a run; grpo doctor tries it once",
                EXIT_CONFIG,
            )
    found: list[ScoredCompletion] = []
    seconds: list[float] = []
    with copied(config) as tried:
        scoring = Scoring(tried, list(offline.sources.values()), prints=not as_json)
        try:
            await scoring.start()
            for where, job in groups:
                began = time.perf_counter()
                found += await _score(scoring, config, where, job)
                seconds.append(time.perf_counter() - began)
        except VerifierFailure as failure:  # of the start
            raise ConsoleError(str(failure), EXIT_CONFIG) from None
        finally:
            await scoring.close()
    summary = _summary(found, seconds)
    if as_json:
        print_json({"completions": [vars(one) for one in found], **summary})
    else:
        _show(found, summary)
    return EXIT_FAILED if summary["failures"] else EXIT_OK


def _groups(offline: Offline, file: Path | None) -> Iterator[tuple[str, Job]]:
    """Return the groups to score with their places."""
    if file is None:
        for source in offline.sources.values():
            yield f"{source.name}, row 0", offline.first_answer(source)
        return
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConsoleError(f"--completions {file}: {error.strerror}; give a file of JSON lines", EXIT_CONFIG) from None
    if not any(line.strip() for line in lines):
        raise DataError(f"--completions {file}: the file is empty: add lines")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{file.name}:{number}", offline.group(line, f"{file}:{number}")


async def _score(scoring: Scoring, config: RunConfig, where: str, job: Job) -> list[ScoredCompletion]:
    try:
        found: Scores = await scoring.score(job)
    except VerifierFailure as failure:
        return [ScoredCompletion(where, text, failure=str(failure)) for text in job.completions]
    rewards = combine(found.scores, config.verifiers)
    thresholds = config.thresholds(job.source)
    known = thresholds.keys() <= found.scores.keys()  # otherwise its environment's score counts, too, and needs a rollout
    judged = (known and solved(found.scores, thresholds)) or [None] * len(rewards)
    return [
        ScoredCompletion(
            where,
            text,
            rewards[i],
            {name: column[i] for name, column in found.scores.items()},
            judged[i],
            msgspec.json.decode(found.notes[i]) if found.notes else {},
        )
        for i, text in enumerate(job.completions)
    ]


def _summary(found: Sequence[ScoredCompletion], seconds: Sequence[float]) -> dict[str, Any]:
    rewards = [one.reward for one in found if one.reward is not None]
    return {
        "rewards": len(rewards),
        "mean": math.fsum(rewards) / len(rewards) if rewards else None,
        "failures": sum(bool(one.failure) for one in found),
        "seconds": math.fsum(seconds),
        "seconds_per_group": math.fsum(seconds) / len(seconds),
    }


def _show(found: Sequence[ScoredCompletion], summary: dict[str, Any]) -> None:
    names = list(dict.fromkeys(name for one in found for name in one.scores))
    numbers = ("reward", "solved", *names)
    rows = table("where", "completion", *numbers, right=numbers)
    for one in found[:SHOWN]:
        text = one.completion if len(one.completion) <= TEXT_CHARACTERS else f"{one.completion[: TEXT_CHARACTERS - 1]}…"
        judged = {True: "yes", False: "no", None: ""}[one.solved]
        shown = ["" if one.reward is None else f"{one.reward:g}", judged]
        scores = (f"{one.scores[name]:g}" if name in one.scores else "" for name in names)
        rows.add_row(cell(one.where), cell(text), *shown, *scores)
    show(rows)
    if len(found) > SHOWN:
        print(f"… and {len(found) - SHOWN} more: use --json to see all")
    for failure in dict.fromkeys(one.failure for one in found if one.failure):
        print(f"failed: {printable(failure)}")
    mean = "" if summary["mean"] is None else f", mean reward {summary['mean']:g}"
    print(
        f"{summary['rewards']} scored, {summary['failures']} failed{mean}; {summary['seconds_per_group'] * 1000:.1f} ms a group",
        flush=True,
    )
