"""The result of a campaign: as JSON, and as a table for a person."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from tests.sync_faults.campaign import Hit, Outcome


def result(outcome: Outcome, **facts: Any) -> dict[str, Any]:
    """Return plain values; `facts` are the parameters of the campaign."""
    struck = [hit for hit in outcome.hits if hit.struck]
    return {
        **facts,
        "faults": len(struck),
        "not_struck": len(outcome.hits) - len(struck),
        "rounds": outcome.rounds,
        "compared": outcome.compared,
        "kinds": _figures(struck, lambda hit: hit.fault.kind),
        "phases": _figures(struck, lambda hit: hit.fault.phase),
        "hits": [
            {"kind": hit.fault.kind, "phase": hit.fault.phase, "round_s": round(hit.round_s, 2), "missed": hit.missed,
             "later_s": [round(seconds, 2) for seconds in hit.later_s]}
            for hit in struck
        ],
        "violations": outcome.violations,
    }  # fmt: skip


def _figures(hits: list[Hit], of: Callable[[Hit], str]) -> dict[str, Any]:
    found = {}
    for name in sorted({of(hit) for hit in hits}):
        mine = [hit for hit in hits if of(hit) == name]
        missed, later = [hit.missed for hit in mine], [seconds for hit in mine for seconds in hit.later_s]
        found[name] = {
            "n": len(mine),
            "median_s": round(median(hit.round_s for hit in mine), 2),
            "worst_s": round(max(hit.round_s for hit in mine), 2),
            "later_median_s": round(median(later), 2),
            "later_worst_s": round(max(later), 2),
            "missed_median": median(missed),
            "missed_worst": max(missed),
        }
    return found


def table(found: dict[str, Any]) -> str:
    """Return the cost of each kind and phase, and the counts."""
    lines = [f"{'':<18} {'n':>3} {'round median, worst s':>22} {'rounds after it':>16} {'versions missed':>16}"]
    for name, of in [*found["kinds"].items(), *found["phases"].items()]:
        spans = [
            f"{of['median_s']:.2f} {of['worst_s']:.2f}",
            f"{of['later_median_s']:.2f} {of['later_worst_s']:.2f}",
            f"{of['missed_median']:g} {of['missed_worst']}",
        ]
        lines.append(f"{name:<18} {of['n']:>3} {spans[0]:>22} {spans[1]:>16} {spans[2]:>16}")
    counts = f"{found['faults']} faults, {found['not_struck']} not struck, {found['rounds']} rounds"
    lines.append(f"{counts}, {found['compared']} sets of weights compared")
    return "\n".join(lines)
