"""Decides the outcome of a finished group. Pure.

Guarantees: a header that would break what comes after it goes to the dead letters with the reason; the filters run in the order
of docs/semantics.md. What else a header contains is right by construction (services/groups/records.py).
"""

from __future__ import annotations

from services.config import RunConfig
from services.dataprep.replay.admission import is_stale
from services.groups import advantages
from services.groups import replay_weights as replay
from services.groups.group_statistics import constant_kind
from services.protocol.messages import Header
from services.store import HeaderEntry, Settlement

MOST_REWARD = 1e12
"""Sums and squares of rewards up to this stay finite; they are weighted sums of scores of at most a million."""
NUMBERS = 10**9
"""Epochs and rows are below this (store/functions/arguments.lua)."""


def settle(item: HeaderEntry, next_step: int, config: RunConfig, base: int = 0) -> Settlement:
    """Insert a group, drop it with its outcome, or send an invalid header to the dead letters with the reason.

    `base` is the policy version that recency weights are relative to.
    """
    header = item.header
    if header is None:
        return Settlement(item, f"failed:corrupt header: {item.fault}")
    if fault := _fault(header, next_step, config):
        return Settlement(item, f"failed:{fault}")
    oldest, rate = min(header.oldest), None
    if header.solved and (config.filters.exclude_pass_rate or config.data.curriculum_function):
        rate = (header.index, sum(header.solved) / len(header.solved), config.filters.exclude_pass_rate)
    outcome = _filtered(header, config)
    if not outcome and is_stale(next_step, oldest, config.admission.max_staleness):
        outcome = "stale"
    if outcome:
        return Settlement(item, outcome, oldest, rate=rate)
    weight = 1.0
    if config.replay.sampler == "prioritized":
        weight = replay.weight(header, advantages.advantages(header.rewards, config.advantage.kind), config, base)
    return Settlement(item, "insert", oldest, weight, replay.exponential(config.run.seed, header.ticket, 0), rate)


def _filtered(header: Header, config: RunConfig) -> str:
    """Return the outcome of a group that a filter drops, or empty."""
    if config.filters.zero_std and (kind := constant_kind(header)):
        return f"filtered:{kind}"
    if config.advantage.mask_truncated and all(header.truncated):
        return "filtered:all_truncated"
    return ""


def _fault(header: Header, next_step: int, config: RunConfig) -> str:
    """Return why a header cannot be used, or empty. A foreign client may have sent it, or a generator with other settings."""
    maximum = config.sampling.group_size
    minimum, n, segments = config.sampling.min_group_size or maximum, len(header.rewards), len(header.lengths)
    if not minimum <= n <= maximum:
        remedy = f", of which sampling.min_group_size requires {minimum}" if minimum < maximum else ""
        return f"the header has {n} rewards, but sampling.group_size is {maximum}{remedy}"
    optional = (header.solved, header.turns, header.tool_s, header.tool_calls, header.malformed_calls)
    of_rollouts = [header.truncated, *header.scores.values(), *filter(None, optional)]
    of_segments = [header.rollout or header.rewards, header.oldest, header.newest, header.tool_tokens]
    of_segments += filter(None, (header.context_tokens, header.contexts))
    if any(len(column) != n for column in of_rollouts) or any(len(column) != segments for column in of_segments):
        return f"not every column of the header has {n} rollouts or {segments} segments"
    numbers = header.epoch, header.index
    if header.ticket != f"{header.epoch}-{header.index}" or not all(0 <= number < NUMBERS for number in numbers):
        return f"epoch {header.epoch} and row {header.index} are impossible"
    if all(header.source != source.name for source in config.data.sources):
        return f"no prompt source is called {header.source!r}"
    if not all(abs(reward) <= MOST_REWARD for reward in header.rewards):
        return f"rewards {header.rewards} are not numbers of at most {MOST_REWARD:g}"
    sizes = [sum(pair) for pair in zip(header.context_sizes, header.lengths, strict=True)]
    if min(header.lengths) < 1 or max(sizes) > config.trainer.row_tokens:
        return (
            f"segments of {sizes} tokens with contexts are empty, or longer than trainer.row_tokens = {config.trainer.row_tokens}"
        )
    if min(header.oldest) < 0 or any(not old <= new <= next_step for old, new in zip(header.oldest, header.newest, strict=True)):
        return f"policy versions {header.oldest}..{header.newest} are impossible at step {next_step}"
    return ""
