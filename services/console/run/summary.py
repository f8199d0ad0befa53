"""Computes and writes `summary.json`, the results of a run. Computing is pure; writing is atomic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from services.config import RunConfig
from services.operations import figures
from services.operations.inspection.ledger import AuditReport
from services.store import RunState

ENDS = 10  # steps over which the first and the last reward are averaged


@dataclass(frozen=True)
class Concluded:
    """How a start of the run ended."""

    status: str
    wall_s: float  # over all starts of the run
    restarts: Mapping[str, int]


def summarise(
    config: RunConfig,
    rows: Sequence[Mapping[str, float]],
    state: RunState | None,
    audit: AuditReport | None,
    ended: Concluded,
    evaluated: Sequence[Mapping[str, float]] = (),
) -> dict[str, Any]:
    """Return figures over `rows`, the steps in order, and `evaluated`, the complete evaluation rounds; None for unknown ones."""
    rewards = _values(rows, figures.REWARD)
    ends = ends_of(len(rewards))
    lags = _values(rows, figures.LAG_MAX)
    fleet = _values(rows, "fleet/generators")
    return {
        "run": config.run.name,
        "status": ended.status,
        "model": config.model.path,
        "seed": config.run.seed,
        "steps": state.committed_step + 1 if state else len(rows),
        "reward_first": fmean(rewards[:ends]) if rewards else None,
        "reward_last": fmean(rewards[-ends:]) if rewards else None,
        "lost": audit.lost if audit else None,
        "doubled": audit.doubled if audit else None,
        "max_lag": max(lags, default=None),
        "max_staleness": config.admission.max_staleness,
        "stale_dropped": audit.outcomes["stale"] if audit else None,
        "generators": int(max(fleet, default=config.generator.count)),
        "syncs": state.published_version + 1 if state else 0,
        "tokens_per_s_generated": figures.average_rate(rows, figures.GENERATED),
        "tokens_per_s_trained": figures.average_rate(rows, figures.TRAINED),
        "wall_s": round(ended.wall_s, 3),
        "restarts": dict(ended.restarts),
        "audit": audit.as_dict() if audit else None,
        "evaluations": len(evaluated),
        "evaluation_last": dict(evaluated[-1]) if evaluated else None,
    }


def ends_of(steps: int) -> int:
    """Return over how many steps the first and the last reward are averaged: of a short run, at most half of them."""
    return max(1, min(ENDS, steps // 2))


def read(path: Path) -> dict[str, Any]:
    """Return the summary that an earlier start of the run left, or an empty one."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def write(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary atomically."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    temporary.replace(path)


def in_words(summary: Mapping[str, Any]) -> list[str]:
    """Return the summary as a few lines of text."""
    first, last = summary["reward_first"], summary["reward_last"]
    last_round = summary["evaluation_last"]
    failed = (summary["audit"] or {}).get("outcomes", {}).get("failed", 0)
    reward = f"reward {first:.3f} → {last:.3f}, " if first is not None else ""
    lag = "" if summary["max_lag"] is None else f"largest lag {summary['max_lag']:.0f} of {summary['max_staleness']}, "
    checked = (
        "tickets not audited"
        if summary["lost"] is None
        else (f"{summary['lost']} tickets lost, {summary['doubled']} duplicated, {summary['stale_dropped']} dropped as stale")
    )
    return [
        f"{summary['steps']} steps in {figures.duration(summary['wall_s'])}, {summary['syncs']} weight syncs, "
        f"{sum(summary['restarts'].values())} restarts",
        f"{reward}{lag}{checked}",
        *([figures.evaluation_line(last_round)] if last_round else []),
        *([figures.prompts_failed(failed)] if failed else []),
    ]


def _values(rows: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]
