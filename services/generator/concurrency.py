"""Limits the tickets that a generator holds at a time, by the load of its engine and the needs of the other pods. Pure.

Guarantees: the limit stays in 1..`most`. It grows only while nothing is queued in the engine, the engine and the KV cache have
room for what is added, and the pod is at its limit. It shrinks, at most by half at a time, when completions stay queued or the
KV cache is full. So each ticket is claimed by a pod that can run it at once; a slow pod holds few, a fast one many.

An engine runs at most `generator.max_num_seqs` completions. If completions queue while fewer are running, the number running is
its capacity; it is used instead, until a higher number is tried after `PROBE_LOOKS` polls, since it changes with the lengths of
completions. vLLM's statistics count preemptions, but KV cache usage gives the same information for any engine: at `KV_FULL`
some completions are preempted or about to be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from services.config import RunConfig
from services.generator.engines.base import Gauges

Reason = Literal["start", "room", "queue", "kv"]
REASONS: tuple[Reason, ...] = get_args(Reason)

POLL_S = 0.25  # between polls of the engine: several iterations, and short compared to a completion
SCORING_TIMES = 4  # groups that may wait for their scores, as a multiple of those being generated
SLACK_SHARE = 4  # one extra completion per this many running: on its way into the engine, or ready when one ends
PATIENCE_LOOKS = 2  # polls for which a queue must last
KV_FULL, KV_ROOM = 0.95, 0.9  # the limit shrinks above the first; it grows while usage with the addition is below the second
KV_CALM_LOOKS = 40  # polls without growth after the KV cache was full, since completions must get long before it fills again
PROBE_LOOKS = 120  # polls, half a minute, after which a higher number is tried


@dataclass(frozen=True)
class Limit:
    """How many tickets to hold, and the state kept between polls."""

    groups: int
    reason: Reason = "start"
    """Why it last changed."""
    capacity: int = 0
    """Completions that ran while others were queued. 0: not known to be below `generator.max_num_seqs`."""
    calm: int = 0
    """Polls since the limit last shrank, or since a queue was last seen that could not be shortened."""
    queue: tuple[int, int] = (0, 0)
    """The current queue: the polls it has lasted, and the completions that ran when it began."""
    tokens: int = 0
    """Tokens that the engine had sampled."""


@dataclass(frozen=True)
class Bounds:
    """Limits that stay the same during the life of a pod."""

    most: int
    """Maximum number of groups. Completions of a group end at different times, so keeping an engine full needs more groups than
    fit at once."""
    seats: int
    """Maximum number of completions that an engine runs at a time."""
    group_size: int

    @classmethod
    def of(cls, config: RunConfig) -> Bounds:
        """Return the bounds of a run's generators."""
        seats, group_size = config.generator.max_num_seqs, config.sampling.group_size
        return cls(max(1, 2 * seats // group_size), seats, group_size)

    @property
    def scoring(self) -> int:
        """Groups that may wait for their scores: enough for verifiers that take several times as long as a completion."""
        return SCORING_TIMES * self.most

    @property
    def runnable(self) -> int:
        """Groups that fill an engine if its KV cache holds them, with some slack. The limit starts here."""
        return min(self.most, max(1, (self.seats + self.seats // SLACK_SHARE) // self.group_size))


def fair_share(slots: int, generators: int) -> int:
    """Return how many tickets a generator claims before others have had their share: its part of the run's slots, rounded up."""
    return max(1, -(-slots // max(1, generators)))


def adjust(limit: Limit, gauges: Gauges, held: int, bounds: Bounds) -> Limit:
    """Return the limit after a poll of the engine of a pod that holds `held` tickets.

    An engine that has sampled no token since the last poll (paused, idle, or in a long prefill) changes nothing.
    """
    if gauges.tokens == limit.tokens:
        return limit
    slack = gauges.running // SLACK_SHARE
    most_queued = max(slack, bounds.group_size - 1)  # the rest of a started group may be queued
    calm, (looks, before) = limit.calm + 1, limit.queue
    queue = (looks + 1, before if looks else gauges.running) if gauges.queued > most_queued else (0, 0)
    capacity = max(limit.capacity, gauges.running) if limit.capacity and calm < PROBE_LOOKS else 0
    limit = replace(limit, capacity=capacity, calm=calm, queue=queue, tokens=gauges.tokens)
    if gauges.kv_usage >= KV_FULL:
        # While the pod holds more than the limit, the last reduction has not taken effect yet.
        return _fall(limit, min(limit.groups, held) * 3 // 4, "kv") if 0 < held <= limit.groups else limit
    looks, before = queue
    if looks >= PATIENCE_LOOKS and gauges.running:
        if gauges.running > before + slack:  # a prefill that progresses
            return replace(limit, queue=(1, gauges.running))
        excess = -(-(gauges.queued - most_queued) // bounds.group_size)
        limit = replace(limit, capacity=max(before, gauges.running), queue=(looks, gauges.running))  # confirmed as the capacity
        return _fall(limit, min(limit.groups, held - excess), "queue")
    groups = min(bounds.most, limit.groups + _growth(limit, gauges, held, bounds))
    return replace(limit, groups=groups, reason="room") if groups > limit.groups else limit


def _fall(limit: Limit, wanted: int, reason: Reason) -> Limit:
    return replace(limit, groups=max(1, wanted, limit.groups // 2), reason=reason, calm=0)


def _growth(limit: Limit, gauges: Gauges, held: int, bounds: Bounds) -> int:
    """Return how many groups to add: a quarter, as far as the engine can start them at once and the KV cache holds them."""
    if held < limit.groups or limit.queue[0] or (limit.reason == "kv" and limit.calm < KV_CALM_LOOKS):
        return 0
    capacity = min(limit.capacity or bounds.seats, bounds.seats)
    free = capacity - gauges.running - gauges.waiting
    added = min(max(1, limit.groups // 4), -(-free // bounds.group_size) + capacity // SLACK_SHARE // bounds.group_size)
    if gauges.kv_usage * (held + added) > KV_ROOM * held:
        added = int(held * KV_ROOM / gauges.kv_usage) - held
    return max(0, added)
