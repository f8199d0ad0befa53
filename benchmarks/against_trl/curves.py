"""What one run of the example showed, step by step, and how two of them compare.

The reward of a step is the mean over the completions that it trains, and the curve their running mean over `WINDOW` steps, for
every side alike. A target is reached at the end of the first step where that mean is at it or above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

WINDOW = 5
SAME_RATE = 1e-6
Clock = str
"""`generation`: seconds from when a side begins to sample its first completion; `command`: from the start of its command."""


@dataclass
class Curve:
    """One run: what it showed at the end of every step. Times are seconds since the start of its command."""

    started: float
    generating: float = math.nan
    seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)  # generated since the step before
    trained: list[float] = field(default_factory=list)  # in the loss of the step
    lags: list[float] = field(default_factory=list)
    completions: list[int] = field(default_factory=list)  # trained in the step
    rates: list[float] = field(default_factory=list)  # learning rate of the step
    idle_share: float = 0.0
    peak_mib: float = 0.0
    load: float = 0.0  # of the machine before it began

    def add(
        self, time_s: float, reward: float, tokens: float, trained: float, *, completions: int, rate: float, lag: float = 0.0
    ) -> None:
        """Add a step that ended at `time_s` of the clock."""
        self.seconds.append(time_s - self.started)
        self.rewards.append(reward)
        self.tokens.append(tokens)
        self.trained.append(trained)
        self.lags.append(lag)
        self.completions.append(completions)
        self.rates.append(rate)

    def smooth(self) -> list[tuple[float, float]]:
        """Return seconds since the start of the command, and the running mean of the rewards there."""
        return [
            (self.seconds[i], sum(self.rewards[i + 1 - WINDOW : i + 1]) / WINDOW) for i in range(WINDOW - 1, len(self.rewards))
        ]

    def reaches(self, target: float, clock: Clock = "generation") -> float:
        """Return the seconds until the curve is at the target; infinity if it never is."""
        reached = next((at for at, reward in self.smooth() if reward >= target), math.inf)
        return reached - (self.generating if clock == "generation" else 0.0)

    def whole(self, clock: Clock = "generation") -> float:
        """Return the seconds of all steps."""
        return self.seconds[-1] - (self.generating if clock == "generation" else 0.0)

    def per_s(self, amounts: Sequence[float]) -> float:
        """Return what came with every step but the first, a second."""
        return sum(amounts[1:]) / (self.seconds[-1] - self.seconds[0])

    def figures(self, name: str) -> dict[str, float]:
        """Return what is reported of this run alone."""
        told = {
            "steps_per_s": self.per_s([1.0] * len(self.seconds)), "tokens_per_s": self.per_s(self.tokens),
            "trained_tokens_per_s": self.per_s(self.trained), "idle_share": self.idle_share, "peak_mib": self.peak_mib,
            "lag": sum(self.lags) / len(self.lags), "last_reward": sum(self.rewards[-WINDOW:]) / WINDOW,
            "to_generation_s": self.generating, "first_step_s": self.seconds[0] - self.generating, "load": self.load,
        }  # fmt: skip
        return {f"{name}.{key}": value for key, value in told.items()}

    def fault(self, steps: int, completions: int, rates: Sequence[float]) -> str:
        """Return how this run was another one than it should have been; empty if it was not."""
        if len(self.seconds) != steps:
            return f"{len(self.seconds)} steps instead of {steps}"
        if wrong := [count for count in self.completions if count != completions]:
            return f"a step of {wrong[0]} completions instead of {completions}"
        for step, (rate, wanted) in enumerate(zip(self.rates, rates, strict=True)):
            if abs(rate - wanted) > SAME_RATE * wanted:
                return f"learning rate {rate} instead of {wanted} in step {step}"
        return "" if math.isfinite(self.generating) else "nobody saw its first completion begin"

    def to_json(self) -> dict[str, Any]:
        """Return what `Curve(**…)` takes."""
        return asdict(self)


def ratio(peer: Curve, mine: Curve, target: float, clock: Clock = "generation") -> float:
    """Return the peer's seconds to the target over mine: above 1, mine was there first.

    Where the peer never got there, its whole run stands for it, which is too little. Where mine never did, the ratio is 0, and
    where neither did, not a number.
    """
    theirs, ours = peer.reaches(target, clock), mine.reaches(target, clock)
    if math.isinf(ours):
        return math.nan if math.isinf(theirs) else 0.0
    return (peer.whole(clock) if math.isinf(theirs) else theirs) / ours


def name_of(target: float) -> str:
    """Return the end of a key: 0.5 is `05`."""
    return str(target).replace(".", "")


def ratios(prefix: str, peer: Curve, mine: Curve, targets: Sequence[float], clock: Clock = "generation") -> dict[str, float]:
    """Return the ratio at every target, under `PREFIX_05`, and the least of them under PREFIX."""
    found = {f"{prefix}_{name_of(target)}": ratio(peer, mine, target, clock) for target in targets}
    known = [value for value in found.values() if not math.isnan(value)]
    return {prefix: min(known, default=math.nan), **found}


def unreached(curves: Mapping[str, Curve], targets: Sequence[float]) -> dict[str, list[str]]:
    """Return the runs that did not get there, by target."""
    return {
        str(target): names
        for target in targets
        if (names := [name for name, curve in curves.items() if math.isinf(curve.reaches(target))])
    }
