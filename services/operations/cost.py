"""The cost of a run: its device-seconds by outcome, and per unit of its output. Reads only the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.operations import account
from services.operations.history import INCARNATION, STEP, history_of

if TYPE_CHECKING:
    from services.operations.samples.outcomes import SampledTokens

REWARD = "reward/gen/mean"
TENTH = 10  # reward at begin and end: means over a tenth of the steps
NEGLIGIBLE_S = 0.005
TRAINED, SOLVED, GAINED = "a million trained tokens", "a solved prompt", "a point of mean reward gained"
LEFT_OUT = "no prices per trained token and solved prompt, because the sample log is not complete"


@dataclass(frozen=True)
class Cost:
    """Where the devices' time went."""

    spent: dict[str, float]
    """Outcome or activity -> device-seconds, without negligible ones."""
    trainer: dict[str, float]
    """Activity -> device-seconds of the trainer."""
    generator: dict[str, float]
    """Activity -> device-seconds of the generators."""
    pods: dict[str, dict[str, float]]
    """Pod -> activity -> seconds, and its `devices`."""
    tokens: dict[str, float]
    """Outcome -> sampled tokens of the groups that ended so; empty without a sample log."""
    solved: int
    """Solved prompts."""
    yields: dict[str, float]
    """The run's output, by unit; units of which it has produced none, or an unknown amount, are left out."""
    note: str = ""
    """Which units are left out because the sample log is not complete, and why; empty: none."""

    @property
    def total(self) -> float:
        """Return the device-seconds of everything."""
        return sum(self.spent.values())


def cost_of(folder: Path) -> Cost | None:
    """Return the cost of the run in `folder`; None if it has no account. Raises `FolderError` if that cannot be read."""
    found = account.read(folder)
    if not found.pods:
        return None
    steps = history_of(folder / "metrics.jsonl", STEP, lambda record: (record.get(INCARNATION, 0.0), record.get(REWARD)))
    log = _logged(folder, {step: incarnation for step, (incarnation, _) in steps.rows.items()})
    tokens, solved, missing = (log.by_outcome, log.solved, log.missing) if log else (dict[str, float](), 0, "")
    spent = {name: seconds for name, seconds in account.by_outcome(found, tokens).items() if seconds >= NEGLIGIBLE_S}
    known = [reward for _, (_, reward) in sorted(steps.rows.items()) if reward is not None]
    return Cost(
        spent, found.device_seconds("trainer"), found.device_seconds("generator"),
        {name: pod.seconds() | {"devices": pod.devices} for name, pod in found.pods.items()},
        tokens, solved, _yields(log, known), f"{LEFT_OUT}: {missing}" if missing else "",
    )  # fmt: skip


def _logged(folder: Path, steps: Mapping[int, float]) -> SampledTokens | None:
    if not (folder / "samples").is_dir():  # pyarrow takes long to import
        return None
    try:
        from services.operations.samples.outcomes import sampled_tokens
    except ImportError:  # pyarrow is not installed
        return None
    return sampled_tokens(folder, steps)


def _yields(log: SampledTokens | None, rewards: list[float]) -> dict[str, float]:
    tenth = max(1, len(rewards) // TENTH)
    gained = sum(rewards[-tenth:]) / tenth - sum(rewards[:tenth]) / tenth if len(rewards) > 1 else 0.0
    found = {GAINED: gained}
    if log and not log.missing:
        found = {TRAINED: log.by_outcome.get("trained", 0.0) / 1e6, SOLVED: float(log.solved)} | found
    return {what: count for what, count in found.items() if count > 0}
