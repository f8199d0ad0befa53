"""What a run cost: its device-seconds by outcome, and for each thing that it gave. Reads the run's folder alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.operations import account
from services.operations.history import STEP, history_of

REWARD = "reward/gen/mean"
TENTH = 10  # reward at begin and end: means over a tenth of the steps
NEGLIGIBLE_S = 0.005


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
    """What the run has produced, by unit; units of which it has produced none are left out."""

    @property
    def total(self) -> float:
        """Return the device-seconds of everything."""
        return sum(self.spent.values())


def cost_of(folder: Path) -> Cost | None:
    """Return the cost of the run in `folder`; None if it has no account."""
    found = account.read(folder)
    if not found.pods:
        return None
    tokens, solved = _tokens(folder)
    spent = {name: seconds for name, seconds in account.by_outcome(found, tokens).items() if seconds >= NEGLIGIBLE_S}
    steps = history_of(folder / "metrics.jsonl", STEP, lambda record: record.get(REWARD))
    known = [reward for _, reward in sorted(steps.rows.items()) if reward is not None]
    return Cost(
        spent, found.device_seconds("trainer"), found.device_seconds("generator"),
        {name: pod.seconds() | {"devices": pod.devices} for name, pod in found.pods.items()},
        tokens, solved, _yields(tokens.get("trained", 0.0), solved, known),
    )  # fmt: skip


def _tokens(folder: Path) -> tuple[dict[str, float], int]:
    if not (folder / "samples").is_dir():  # pyarrow takes long to import
        return {}, 0
    try:
        from services.operations.samples.outcomes import sampled_tokens
    except ImportError:  # pyarrow is not installed
        return {}, 0
    found = sampled_tokens(folder)
    return found.by_outcome, found.solved


def _yields(trained: float, solved: int, rewards: list[float]) -> dict[str, float]:
    tenth = max(1, len(rewards) // TENTH)
    gained = sum(rewards[-tenth:]) / tenth - sum(rewards[:tenth]) / tenth if len(rewards) > 1 else 0.0
    found = {"a million trained tokens": trained / 1e6, "a solved prompt": float(solved), "a point of mean reward gained": gained}
    return {what: count for what, count in found.items() if count > 0}
