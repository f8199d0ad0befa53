"""The result of a campaign: as JSON, and as a table for a person."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

from tests.faults.campaign import Outcome


def result(outcome: Outcome, **facts: Any) -> dict[str, Any]:
    """Return plain values; `facts` are the parameters of the campaign."""
    kinds: dict[str, list[float | None]] = {}
    for applied in outcome.applied:
        kinds.setdefault(applied.fault.kind, []).append(applied.recovery_s)
    recovery: dict[str, Any] = {}
    for kind, times in sorted(kinds.items()):
        known = [time for time in times if time is not None]
        recovery[kind] = {
            "n": len(times),
            "measured": len(known),
            "median_s": round(median(known), 2) if known else None,
            "worst_s": round(max(known), 2) if known else None,
            "all_s": [round(time, 2) for time in known],
        }
    verdicts = outcome.verdicts
    return {
        **facts,
        "faults": len(outcome.applied),
        "victims": Counter(applied.fault.target for applied in outcome.applied),
        "missed": outcome.missed,
        "runs": len(verdicts),
        "steps": sum(verdict.steps for verdict in verdicts),
        **{
            name: sum(getattr(verdict, name) for verdict in verdicts)
            for name in ("lost", "doubled", "skipped", "leaked", "dropped")
        },
        "max_lag": max((verdict.max_lag for verdict in verdicts), default=None),
        "in_order": _all([verdict.in_order for verdict in verdicts]),
        "bit_identical": _all([verdict.bit_identical for verdict in verdicts]),
        "audits": sum(verdict.audits for verdict in verdicts),
        "went_back": sum(verdict.went_back for verdict in verdicts),
        "recovery_s": recovery,
        "wall_s": round(outcome.wall_s, 1),
        "violations": outcome.violations,
        "inconclusive": outcome.inconclusive,
    }


def _all(results: list[bool | None]) -> bool | None:
    """Combine the results of all runs; None if no run has one."""
    known = [one for one in results if one is not None]
    return all(known) if known else None


def table(found: dict[str, Any]) -> str:
    """Return the recovery times of each kind, and the counts."""
    lines = [f"{'kind':<16} {'n':>4} {'median s':>9} {'worst s':>8}"]
    for kind, of in found["recovery_s"].items():
        figures = [f"{of[name]:.2f}" if of[name] is not None else "-" for name in ("median_s", "worst_s")]
        lines.append(f"{kind:<16} {of['n']:>4} {figures[0]:>9} {figures[1]:>8}")
    lines.append(
        f"{found['faults']} faults in {found['runs']} runs of {found['steps']} steps, {found['audits']} audits: "
        f"{found['lost']} lost, "
        f"{found['doubled']} doubled, {found['skipped']} skipped, {found['leaked']} leaked, {found['dropped']} dropped, "
        f"largest lag {found['max_lag']}; bit-identical: {found['bit_identical']}"
    )
    return "\n".join(lines)
