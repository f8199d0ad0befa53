"""Metrics of groups from their headers, of the groups that a step trains on (`…/train/…`), and of its packed
rows. No clock, no Redis.

Rewards, scores, pass rates and truncation are of rollouts; lengths and staleness are of segments, mostly one in a rollout.

Guarantees: every key is in docs/metrics.md; with several prompt sources each key is also reported per source, with the source's
name before the last part.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from services.groups import histograms
from services.groups.advantages import equal
from services.protocol.messages import Header, RankPlan, Sample

SOLVE_RATES = ("0", "0_25", "25_50", "50_75", "75_100", "100")
"""Bins of a group's solve rate in percent: none, above 0 up to 25, …, above 75 and below 100, all."""
DAMAGED = "damaged/train/groups"
"""Metric of a step: number of groups it lost."""
_UP_TO = (0.0, 0.25, 0.5, 0.75)
CONSTANT: tuple[str, ...] = ("zero", "solved", "nonzero")
"""Kinds of groups whose completions all have the same reward: all 0, all solved, all equal otherwise."""


def constant_kind(header: Header) -> str:
    """Return which of `CONSTANT` a group is, or "" if its rewards differ."""
    if not equal(header.rewards):
        return ""
    if header.rewards[0] == 0:
        return "zero"
    return "solved" if header.solved and all(header.solved) else "nonzero"


def trained(
    headers: Sequence[Header],
    step: int,
    uses: Sequence[int],
    sources: Sequence[str],
    weights: Sequence[float] | None = None,
) -> dict[str, float]:
    """Return metrics of the groups of a step, none without a group. Staleness = step - oldest version, of a segment.

    `uses`: how often each group was trained before. `weights`: their importance weights, if enabled. `sources`: as for
    `GroupSums`.
    """
    if not headers:
        return {}
    lag = step - np.concatenate([header.oldest for header in headers])
    tokens = np.concatenate([header.lengths for header in headers])
    mixed = np.concatenate([np.not_equal(header.oldest, header.newest) for header in headers])
    seen = GroupSums(sources)
    for header in headers:
        seen.add(header)
    record = seen.metrics("train") | {
        **histograms.counted("reward", "train", (reward for header in headers for reward in header.rewards)),
        **histograms.counted("length", "train", (length for header in headers for length in header.lengths)),
        "staleness/trained/mean": float(np.average(lag, weights=tokens)),
        "staleness/trained/max": float(lag.max()),
        "staleness/trained/p99": float(np.percentile(lag, 99)),
        "staleness/trained/off_policy_share": float(np.average(lag > 0, weights=tokens)),
        "staleness/trained/mixed_share": float(mixed.mean()),
        "replay/train/uses_mean": float(np.mean(uses)),
        "replay/train/replayed_share": float(np.mean(np.greater(uses, 0))),
    }
    if weights is not None:
        record |= {"replay/train/weight_min": float(min(weights)), "replay/train/weight_mean": float(np.mean(weights))}
    return record


def is_trained(name: str) -> bool:
    """Return whether a metric describes what a step trains on."""
    return name.removeprefix(histograms.PREFIX).split("/")[1:2] in (["train"], ["trained"])


class GroupSums:
    """Sums over all groups and, with several sources, over those of each source."""

    def __init__(self, sources: Sequence[str]) -> None:
        """`sources`: names of the prompt sources."""
        self.all = _Groups()
        self._of = {name: _Groups() for name in sources} if len(sources) > 1 else {}

    def add(self, header: Header) -> None:
        """Count a group."""
        self.all.add(header)
        if header.source in self._of:
            self._of[header.source].add(header)

    def metrics(self, scope: str) -> dict[str, float]:
        """Return metrics by name, none without a group."""
        record = self.all.metrics(scope)
        for name, groups in self._of.items():
            record |= groups.metrics(f"{scope}/{name}")
        return record


class _Groups:
    """Running sums over groups, their rollouts and segments."""

    def __init__(self) -> None:
        self.groups = self.rollouts = self.segments = self.tokens = self.tool_tokens = self.truncated = 0
        self.constant = dict.fromkeys(CONSTANT, 0)  # groups by kind
        self.shortest, self.longest = math.inf, 0
        self.by_outcome = {True: [0, 0], False: [0, 0]}  # solved or not -> tokens and segments of such rollouts
        self.turned = self.turns = self.most_turns = 0  # rollouts that ran in environments, and their turns
        self.environment_s = 0.0
        self.tool_calls = self.malformed_calls = 0
        self.judged = 0  # groups with a verifier that decides what is solved
        self.solve_rates = [0] * len(SOLVE_RATES)
        self.scores: dict[str, float] = {}  # of verifiers that every group has: a generator reports which it has
        # Rewards minus the first one: their squares keep the digits of a small spread around a large mean.
        self.first, self.rewards, self.squares = 0.0, 0.0, 0.0

    def add(self, header: Header) -> None:
        rewards, size = header.rewards, len(header.rewards)
        if not self.groups:
            self.first, self.scores = rewards[0], dict.fromkeys(header.scores, 0.0)
        self.groups += 1
        self.rollouts += size
        self.segments += len(header.lengths)
        if kind := constant_kind(header):
            self.constant[kind] += 1
        offsets = [reward - self.first for reward in rewards]
        self.rewards += sum(offsets)
        self.squares += sum([offset * offset for offset in offsets])
        self.tokens += sum(header.lengths)
        self.tool_tokens += sum(header.tool_tokens)
        self.truncated += sum(header.truncated)
        self.shortest = min(self.shortest, *header.lengths)
        self.longest = max(self.longest, *header.lengths)
        if header.turns:
            self.turned += len(header.turns)
            self.turns += sum(header.turns)
            self.most_turns = max(self.most_turns, *header.turns)
            self.environment_s += sum(header.tool_s)
            self.tool_calls += sum(header.tool_calls)
            self.malformed_calls += sum(header.malformed_calls)
        self.scores = {name: total + sum(header.scores[name]) for name, total in self.scores.items() if name in header.scores}
        if header.solved:
            solved = sum(header.solved)
            self.judged += 1
            self.solve_rates[bisect_left(_UP_TO, solved / size) if solved < size else -1] += 1
            for owner, length in zip(header.owners, header.lengths, strict=True):
                sums = self.by_outcome[bool(header.solved[owner])]
                sums[0] += length
                sums[1] += 1

    def metrics(self, scope: str) -> dict[str, float]:
        """Return metrics by name, none without a group."""
        if not self.groups:
            return {}
        mean = self.rewards / self.rollouts
        return {
            f"reward/{scope}/mean": self.first + mean,
            f"reward/{scope}/std": math.sqrt(max(0.0, self.squares / self.rollouts - mean * mean)),
            f"reward/{scope}/zero_std_share": sum(self.constant.values()) / self.groups,
            **{f"zero_std/{scope}/{kind}": n / self.groups for kind, n in self.constant.items()},
            **{f"reward/{scope}/{name}": total / self.rollouts for name, total in self.scores.items()},
            **{
                f"solve_rate/{scope}/{b}": n / self.judged
                for b, n in zip(SOLVE_RATES, self.solve_rates, strict=True)
                if self.judged
            },
            f"length/{scope}/mean": self.tokens / self.segments,
            f"length/{scope}/min": float(self.shortest),
            f"length/{scope}/max": float(self.longest),
            **{
                f"length/{scope}/{'solved' if solved else 'unsolved'}": tokens / segments
                for solved, (tokens, segments) in self.by_outcome.items()
                if segments
            },
            f"length/{scope}/stop_share": 1.0 - self.truncated / self.rollouts,
            f"tokens/{scope}/tool_share": self.tool_tokens / self.tokens,
            **self._environment_metrics(scope),
        }

    def _environment_metrics(self, scope: str) -> dict[str, float]:
        """Return metrics of rollouts that ran in environments, none without one."""
        if not self.turned:
            return {}
        return {
            f"turns/{scope}/mean": self.turns / self.turned,
            f"turns/{scope}/max": float(self.most_turns),
            f"environment_s/{scope}/mean": self.environment_s / self.turned,
            f"tool_calls/{scope}/mean": self.tool_calls / self.turned,
            f"malformed_calls/{scope}/mean": self.malformed_calls / self.turned,
            f"segments/{scope}/mean": self.segments / self.rollouts,
        }


def of_rows(ranks: Sequence[RankPlan], row_tokens: int, wanted: int) -> dict[str, float]:
    """Return metrics of the rows of all ranks, none without a segment.

    `row_tokens`: budget of a row. `wanted`: groups of a full step.
    """
    rows = [row for rank in ranks for row in rank.rows]
    if not any(rows):
        return {}
    moving = {sample.payload for row in rows for sample in row if sample.trained_tokens and sample.advantage and sample.weight}
    return {
        "rows/train/packed_ratio": sum(map(tokens, rows)) / (len(rows) * row_tokens),
        "groups/train/real_batch_size_ratio": len(moving) / wanted,
    }


def tokens(row: Iterable[Sample]) -> int:
    """Return the tokens of a row, which holds a context once for all segments that share it."""
    contexts: dict[tuple[str, int], int] = {}
    own = 0
    for sample in row:
        contexts[sample.payload, sample.context] = sample.context_tokens
        own += sample.tokens - sample.context_tokens
    return own + sum(contexts.values())
