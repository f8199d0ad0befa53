"""Counts the sampled tokens of a run by outcome, from its sample log.

Guarantees: with `samples.share` below 1, counts are estimates for all groups; if the log lacks other groups, `missing` says why.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from services.operations.samples.folder import SAMPLES, SampleFolder
from services.operations.samples.search import SETTINGS, log_of, quoted

CHANGES = "changes.jsonl"
"""Changes of a run's configuration; of a fork, its first line has `forked_from` and its first step."""
CONDITION = "condition.json"
METRICS = "metrics.jsonl"
FEW = 3
"""Steps by which a complete log of all groups may end early; a log of a share of the groups may lack more steps."""
BEHIND = 50
"""Steps by which the log of an active run may lag."""
SILENT_S = 60.0
"""Seconds without a step after which the log has caught up, if it is still written."""
_COUNTED = """
    CREATE TEMP TABLE groups AS
    SELECT payload,
        outcome || CASE WHEN outcome = 'filtered' AND reason <> '' THEN ': ' || reason ELSE '' END AS name,
        -- after a restore, a step may train the same tokens again
        sum((coalesce(length, 0) - coalesce(tool_tokens, 0)) * weight) / count(DISTINCT (incarnation, step)) AS sampled,
        bool_or(solved) AS solved,
        avg(weight) AS weight
    FROM logged JOIN (VALUES {weights}) AS weights(file, weight) USING (file)
    GROUP BY payload, name
"""
"""Sampled tokens of each group that ended, which stands for as many groups as the log's share leaves out."""


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens of the groups in a sample log; a group that several steps trained on counts once."""

    by_outcome: dict[str, float] = field(default_factory=dict[str, float])
    """`trained`, `stale`, `filtered: zero`, … -> tokens."""
    solved: int = 0
    """Trained groups with a solved completion."""
    missing: str = ""
    """Why the counts are not those of the whole run: the log lacks groups that are in its share; empty: they are."""


def sampled_tokens(folder: Path, steps: Mapping[int, float]) -> SampledTokens:
    """Return what the log in a run's folder says; steps that a restore has undone count, since their tokens were sampled.

    `steps`: every step of the run -> its incarnation, 0: unknown.
    """
    log = SampleFolder(folder / SAMPLES)
    return log.reading(lambda _: _sampled(log, folder, steps))


def _sampled(log: SampleFolder, folder: Path, steps: Mapping[int, float]) -> SampledTokens:
    missing = ", ".join(_missing(log, folder, steps))
    if not log.parts:
        return SampledTokens(missing=missing)
    weights = ", ".join(f"({quoted(part)}, {1 / part.position.share})" for part in log.parts)
    with duckdb.connect(config=SETTINGS) as connection:
        log_of(connection, log.parts).create_view("logged")
        try:
            connection.execute(_COUNTED.format(weights=weights))
            outcomes = connection.execute("SELECT name, sum(sampled) FROM groups GROUP BY name ORDER BY 2 DESC").fetchall()
            [(solved,)] = connection.execute(
                "SELECT coalesce(sum(weight), 0) FROM groups WHERE name = 'trained' AND solved"
            ).fetchall()
        except duckdb.Error:
            for part in log.parts:
                part.read()  # raises an error that explains it, if a file is damaged or gone
            raise
    return SampledTokens(dict(outcomes), round(solved), missing)


def _missing(log: SampleFolder, folder: Path, steps: Mapping[int, float]) -> Iterator[str]:
    """Yield why the counts are not those of the whole run."""
    status, parts = log.status(), log.parts
    if missed := sum(status.missed.values()):
        yield f"{missed:,} groups were missed because the tracker was behind or not running"
    if status.first_step > _began_at(folder):
        yield f"the log begins at step {status.first_step}"
    if parts and parts[0].first > 1:
        yield "the oldest completions were deleted (samples.keep)"
    if log.damaged or any(log.path.glob("damaged-*")) or any(after.first > before.last + 1 for before, after in pairwise(parts)):
        yield "a file of the log is missing or damaged"
    end = log.position
    later = [step for step, life in steps.items() if (life or end.incarnation, step) > (end.incarnation, end.step)]
    allowed = FEW / end.share if _over(folder) else max(BEHIND, FEW / end.share)
    if later and max(later) - min(later) + 1 > allowed:  # than the tracker would leave out
        where = f"ends at step {min(later) - 1}" if log.parts else "is empty"
        yield f"the sample log {where}, the run at step {max(later)}"


def _over(folder: Path) -> bool:
    """Return whether the run has ended or is silent, according to its folder; on a cluster, that has no condition."""
    try:
        noted: Any = msgspec.json.decode((folder / CONDITION).read_bytes())
        if noted["condition"]["word"] not in ("running", "paused"):
            return True
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        pass
    try:
        return time.time() - (folder / METRICS).stat().st_mtime > SILENT_S
    except OSError:
        return False


def _began_at(folder: Path) -> int:
    """Return the first step of the run: that after the checkpoint for a fork, else 0."""
    try:
        first: Any = msgspec.json.decode((folder / CHANGES).read_bytes().partition(b"\n")[0])
        return int(first["step"]) if "forked_from" in first else 0
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        return 0
