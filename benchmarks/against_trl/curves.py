"""The reward curve of one run of the example, and the comparison of two.

The reward of a step is the mean over the completions that it trains on. The curve is the running mean of these rewards over
`WINDOW` steps, for every side alike. A target is reached at the end of the first step where the running mean is at or above it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

WINDOW = 5
SAME_RATE = 1e-6
Clock = str
"""`generation`: seconds since a side began to sample its first completion; `command`: seconds since its command started."""


@dataclass
class Curve:
    """The measurements of one run at the end of every step. Times are seconds since its command started."""

    started: float
    generating: float = math.nan
    seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)  # generated since the previous step
    trained: list[float] = field(default_factory=list)  # in the loss of the step
    lags: list[float] = field(default_factory=list)
    completions: list[int] = field(default_factory=list)  # trained in the step
    rates: list[float] = field(default_factory=list)  # learning rate of the step
    idle_share: float = 0.0
    peak_mib: float = 0.0
    load: float = 0.0  # of the machine before the run

    def add(
        self, time_s: float, reward: float, tokens: float, trained: float, *, completions: int, rate: float, lag: float = 0.0
    ) -> None:
        """Add a step that ended at clock time `time_s`."""
        self.seconds.append(time_s - self.started)
        self.rewards.append(reward)
        self.tokens.append(tokens)
        self.trained.append(trained)
        self.lags.append(lag)
        self.completions.append(completions)
        self.rates.append(rate)

    def smooth(self) -> list[tuple[float, float]]:
        """Return (seconds since the command started, running mean of the rewards) from the first full window on."""
        return [
            (self.seconds[i], sum(self.rewards[i + 1 - WINDOW : i + 1]) / WINDOW) for i in range(WINDOW - 1, len(self.rewards))
        ]

    def reaches(self, target: float, clock: Clock = "generation") -> float:
        """Return the seconds until the curve reaches the target; infinity if it never does."""
        reached = next((at for at, reward in self.smooth() if reward >= target), math.inf)
        return reached - (self.generating if clock == "generation" else 0.0)

    def whole(self, clock: Clock = "generation") -> float:
        """Return the seconds until the last step ended."""
        return self.seconds[-1] - (self.generating if clock == "generation" else 0.0)

    def per_s(self, amounts: Sequence[float]) -> float:
        """Return the sum of `amounts` per second, excluding the first step."""
        return sum(amounts[1:]) / (self.seconds[-1] - self.seconds[0])

    def figures(self, name: str) -> dict[str, float]:
        """Return the figures of this run alone, keyed `NAME.figure`."""
        values = {
            "steps_per_s": self.per_s([1.0] * len(self.seconds)), "tokens_per_s": self.per_s(self.tokens),
            "trained_tokens_per_s": self.per_s(self.trained), "idle_share": self.idle_share, "peak_mib": self.peak_mib,
            "lag": sum(self.lags) / len(self.lags), "last_reward": sum(self.rewards[-WINDOW:]) / WINDOW,
            "to_generation_s": self.generating, "first_step_s": self.seconds[0] - self.generating, "load": self.load,
        }  # fmt: skip
        return {f"{name}.{key}": value for key, value in values.items()}

    def fault(self, steps: int, completions: int, rates: Sequence[float]) -> str:
        """Return how this run deviates from the intended one; empty if it does not."""
        if len(self.seconds) != steps:
            return f"{len(self.seconds)} steps instead of {steps}"
        if wrong := [count for count in self.completions if count != completions]:
            return f"a step of {wrong[0]} completions instead of {completions}"
        for step, (rate, wanted) in enumerate(zip(self.rates, rates, strict=True)):
            if abs(rate - wanted) > SAME_RATE * wanted:
                return f"learning rate {rate} instead of {wanted} in step {step}"
        return "" if math.isfinite(self.generating) else "the start of its first completion was not observed"

    def to_json(self) -> dict[str, Any]:
        """Return the arguments for `Curve(**…)`."""
        return asdict(self)


def ratio(peer: Curve, mine: Curve, target: float, clock: Clock = "generation") -> float:
    """Return the peer's seconds to the target over mine; above 1, mine reached it first.

    If the peer never reached it, the length of its whole run is used, which favours the peer. If mine never did, the ratio is
    0; if neither did, NaN.
    """
    theirs, ours = peer.reaches(target, clock), mine.reaches(target, clock)
    if math.isinf(ours):
        return math.nan if math.isinf(theirs) else 0.0
    return (peer.whole(clock) if math.isinf(theirs) else theirs) / ours


def name_of(target: float) -> str:
    """Return the suffix of a target's keys, e.g. `05` for 0.5."""
    return str(target).replace(".", "")


def ratios(prefix: str, peer: Curve, mine: Curve, targets: Sequence[float], clock: Clock = "generation") -> dict[str, float]:
    """Return the ratio at every target under `PREFIX_05` etc., and the smallest under `PREFIX`."""
    found = {f"{prefix}_{name_of(target)}": ratio(peer, mine, target, clock) for target in targets}
    known = [value for value in found.values() if not math.isnan(value)]
    return {prefix: min(known, default=math.nan), **found}


def unreached(curves: Mapping[str, Curve], targets: Sequence[float]) -> dict[str, list[str]]:
    """Return the runs that never reached each target, by target."""
    return {
        str(target): names
        for target in targets
        if (names := [name for name, curve in curves.items() if math.isinf(curve.reaches(target))])
    }
