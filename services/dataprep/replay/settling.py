"""Decides the outcome of a finished group. Pure.

Guarantees: an invalid header goes to the dead letters with the reason; the filters run in the order of docs/semantics.md.
"""

from __future__ import annotations

import math

from services.algorithm import advantages
from services.algorithm.group_statistics import constant_kind
from services.algorithm.segments import segment_fault
from services.config import RunConfig
from services.config.verifiers import named
from services.dataprep.replay import weights as replay
from services.dataprep.replay.admission import is_stale
from services.protocol.messages import Header
from services.store import HeaderEntry, Settlement
from services.verifiers.numeric import MOST_SCORE

ROUNDING = 1e-8  # of sums of floats, relative
NUMBERS = 10**9
"""Epochs and rows are below this (store/functions/arguments.lua)."""
_OWN = ("solved", "turns", "tool_s", "tool_calls", "malformed_calls")  # columns with a value for each rollout, or none


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
    if header.solved and (config.filters.exclude_pass_rate or config.data.curriculum):
        rate = (header.index, sum(header.solved) / len(header.solved), config.filters.exclude_pass_rate)
    outcome = _filtered(header, config)
    if not outcome and is_stale(next_step, oldest, config.admission.max_staleness):
        outcome = "stale"
    if outcome:
        return Settlement(item, outcome, oldest, rate=rate)
    seed, weight = config.run.seed, 1.0
    if config.replay.sampler == "prioritized":
        weight = replay.weight(header, advantages.advantages(header.rewards, config.advantage.kind), config, base)
    variate, victim = replay.exponential(seed, header.ticket, 0), replay.uniform(seed, header.ticket, "victim")
    return Settlement(item, "insert", oldest, weight, variate, victim, rate)


def _filtered(header: Header, config: RunConfig) -> str:
    """Return the outcome of a group that a filter drops, or empty."""
    if config.filters.zero_std and (kind := constant_kind(header)):
        return f"filtered:{kind}"
    if config.advantage.mask_truncated and all(header.truncated):
        return "filtered:all_truncated"
    return ""


def _fault(header: Header, next_step: int, config: RunConfig) -> str:
    maximum = config.sampling.group_size
    minimum, n = config.sampling.min_group_size or maximum, len(header.rewards)
    if not minimum <= n <= maximum:
        remedy = f", of which sampling.min_group_size requires {minimum}" if minimum < maximum else ""
        return f"the header has {n} rewards, but sampling.group_size is {maximum}{remedy}"
    columns = {
        "truncated": header.truncated, **{f"scores of {k}": v for k, v in header.scores.items()},
        **{name: column for name in _OWN if (column := getattr(header, name))},
    }  # fmt: skip
    for name, column in columns.items():
        if len(column) != n:
            return f"the header has {len(column)} {name}, but {n} rewards"
    if header.ticket != f"{header.epoch}-{header.index}":
        return f"epoch {header.epoch} and row {header.index} do not belong to ticket {header.ticket}"
    if not (0 <= header.epoch < NUMBERS and 0 <= header.index < NUMBERS):
        return f"epoch {header.epoch} and row {header.index} are impossible"
    if all(header.source != source.name for source in config.data.sources):
        return f"no prompt source is called {header.source!r}"
    if fault := _score_fault(header, config):
        return fault
    if any(turns < 1 for turns in header.turns) or not all(0 <= seconds < math.inf for seconds in header.tool_s):
        return f"turns {header.turns} or seconds of tools {header.tool_s} are impossible"
    if min([*header.tool_calls, *header.malformed_calls], default=0) < 0:
        return f"numbers of tool calls {header.tool_calls} or malformed ones {header.malformed_calls} are impossible"
    if not 1 <= header.prompt_tokens <= config.data.max_prompt_tokens:
        return f"prompt of {header.prompt_tokens} tokens is outside 1..{config.data.max_prompt_tokens}"
    return segment_fault(header, n) or _length_fault(header, config) or _version_fault(header, next_step)


def _length_fault(header: Header, config: RunConfig) -> str:
    """Return what is wrong with the lengths of a header's segments, or empty."""
    if config.environment_of(header.source):
        sizes, longest = [sum(pair) for pair in zip(header.context_sizes, header.lengths, strict=True)], config.model.max_tokens
        if min(header.lengths) < 1 or max(sizes) > longest:
            return f"segments of {sizes} tokens with contexts are longer than model.max_tokens = {longest}, or empty"
        return ""
    if header.rollout or header.contexts:
        return f"rollouts of several segments or with own contexts, but source {header.source!r} has no environment"
    if min(header.lengths) < 1 or max(header.lengths) > config.sampling.max_tokens:
        return f"lengths {header.lengths} are outside 1..{config.sampling.max_tokens}"
    return ""


def _version_fault(header: Header, next_step: int) -> str:
    """Return what is wrong with the policy versions of a header, or empty."""
    if min(header.oldest) < 0 or any(not old <= new <= next_step for old, new in zip(header.oldest, header.newest, strict=True)):
        return f"policy versions {header.oldest}..{header.newest} are impossible at step {next_step}"
    return ""


def _score_fault(header: Header, config: RunConfig) -> str:
    """Return what is wrong with the rewards and scores of a header, or empty."""
    verifiers = named(config.verifiers)
    bounds = {name: verifier.bounds or (-MOST_SCORE, MOST_SCORE) for name, verifier in verifiers}
    limit = math.fsum(abs(verifier.weight) * max(map(abs, bounds[name])) for name, verifier in verifiers)
    if environment := config.environment_of(header.source):
        bounds[environment.name] = -MOST_SCORE, MOST_SCORE
        limit += MOST_SCORE
    if not all(abs(reward) <= limit * (1 + ROUNDING) for reward in header.rewards):
        return f"rewards {header.rewards} are not within {limit:g}, the most that the verifiers can give"
    for name, scores in header.scores.items():
        verifier, _, part = name.partition(".")
        if verifier not in bounds:
            return f"scores of {verifier}, but the verifiers are {', '.join(bounds)}"
        low, high = (-MOST_SCORE, MOST_SCORE) if part else bounds[verifier]
        if not all(low <= score <= high for score in scores):
            return f"scores {scores} of {name} are not numbers from {low:g} to {high:g}"
    return ""
