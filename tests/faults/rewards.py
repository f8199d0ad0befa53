"""Rewards of the profile `failing`: those of some prompts always fail, and all of them fail while a file exists."""

from __future__ import annotations

from pathlib import Path

FAILS_EVERY = 9  # prompts


def fails(answer: str) -> bool:
    """Return whether the rewards of this prompt always fail."""
    return int(answer) % FAILS_EVERY == 1  # not the first prompt, which is tried before the run


def score(completion: str, answer: str, broken: str) -> float:
    """Reward a third of the completions, or raise."""
    if fails(answer) or Path(broken).exists():
        raise RuntimeError(f"no reward for {answer}")
    return float(any(digit in completion for digit in "01234"))
