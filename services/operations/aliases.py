"""The field's common names for our metrics, so that charts of other trainers can be compared with ours. Pure. Guarantees: a name
is given only where its meaning is the same; a metric that a step lacks has no alias there either.
"""

from __future__ import annotations

from collections.abc import Mapping

SAME = {
    "reward/mean": "reward/train/mean",
    "reward/std": "reward/train/std",
    "frac_reward_zero_std": "reward/train/zero_std_share",
    "completions/mean_length": "length/train/mean",
    "completions/min_length": "length/train/min",
    "completions/max_length": "length/train/max",
    "kl": "kl/train/mean",
    "entropy": "entropy/train/mean",
    "grad_norm": "gradient/train/norm",
    "learning_rate": "learning_rate/train/value",
}
"""Name of the field -> ours."""
DERIVED = {
    "completions/clipped_ratio": "1 − `length/train/stop_share`",
    "clip_ratio": "`clip_low/train/fraction` + `clip_high/train/fraction`",
}
"""Name of the field -> how it is computed from ours."""


def aliases(record: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step under the field's names."""
    found = {name: record[ours] for name, ours in SAME.items() if ours in record}
    if (stopped := record.get("length/train/stop_share")) is not None:
        found["completions/clipped_ratio"] = 1.0 - stopped
    clipped = [record[key] for key in ("clip_low/train/fraction", "clip_high/train/fraction") if key in record]
    if clipped:
        found["clip_ratio"] = sum(clipped)
    return found
