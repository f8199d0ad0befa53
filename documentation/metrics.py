"""The reference of the metrics' names in other trainers, and of the metrics that services declare."""

from __future__ import annotations

from monitoring.page import metrics
from services.operations.figures import DERIVED, SAME

INTRODUCTION = """# Metrics: names

[Metrics of a step](../metrics.md) has the meaning of each metric of `metrics.jsonl`. TensorBoard and W&B also receive the most
common ones under the names that TRL and other trainers use:

| there | here |
|---|---|
"""


def page() -> str:
    """Return the page."""
    same = [f"| `{name}` | `{ours}` |" for name, ours in SAME.items()]
    derived = [f"| `{name}` | {how} |" for name, how in DERIVED.items()]
    return f"{INTRODUCTION}{chr(10).join([*same, *derived])}\n\n## What services export to Prometheus\n\n{metrics()}\n"
