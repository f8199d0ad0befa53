"""Metrics of the data: of what was generated now (`…/gen/…`) and of what is trained on now (`…/train/…`). Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.protocol.messages import Header


class GeneratedStats:
    """What arrived since the last step."""

    def __init__(self) -> None:
        self._headers: list[Header] = []
        self._tokens = 0

    def add(self, header: Header) -> None:
        """A settled header."""
        self._headers.append(header)
        self._tokens += sum(header.lengths)

    def take(self) -> dict[str, float]:
        """Metrics of the headers since the last call; `tokens/gen/total` counts from the start of the process."""
        headers, self._headers = self._headers, []
        return _of_headers(headers, "gen") | {"tokens/gen/total": float(self._tokens)}


def trained(headers: Sequence[Header], advantages: Sequence[np.ndarray], step: int) -> dict[str, float]:
    """Metrics of the groups of a step; `advantages` [n] of each. Staleness = step - oldest version, of a completion."""
    lag = step - np.concatenate([header.oldest for header in headers])
    weights = np.concatenate([header.lengths for header in headers])
    mixed = np.concatenate([np.not_equal(header.oldest, header.newest) for header in headers])
    spread = np.concatenate(advantages)
    return _of_headers(headers, "train") | {
        "staleness/trained/mean": float(np.average(lag, weights=weights)),
        "staleness/trained/max": float(lag.max()),
        "staleness/trained/p99": float(np.percentile(lag, 99)),
        "staleness/trained/off_policy_share": float(np.average(lag > 0, weights=weights)),
        "staleness/trained/mixed_share": float(mixed.mean()),
        "advantage/train/min": float(spread.min()),
        "advantage/train/mean": float(spread.mean()),
        "advantage/train/max": float(spread.max()),
    }


def _of_headers(headers: Sequence[Header], scope: str) -> dict[str, float]:
    if not headers:
        return {}
    rewards = np.concatenate([header.rewards for header in headers])
    lengths = np.concatenate([header.lengths for header in headers])
    truncated = np.concatenate([header.truncated for header in headers])
    constant = np.array([max(header.rewards) == min(header.rewards) for header in headers])
    return {
        f"reward/{scope}/mean": float(rewards.mean()),
        f"reward/{scope}/std": float(rewards.std()),
        f"reward/{scope}/zero_std_share": float(constant.mean()),
        f"length/{scope}/mean": float(lengths.mean()),
        f"length/{scope}/min": float(lengths.min()),
        f"length/{scope}/max": float(lengths.max()),
        f"length/{scope}/stop_share": float(1.0 - truncated.mean()),
        **{
            f"reward/{scope}/{verifier}": float(np.mean([np.mean(header.scores[verifier]) for header in headers]))
            for verifier in headers[0].scores
            if all(verifier in header.scores for header in headers)  # a generator says which it has
        },
    }
