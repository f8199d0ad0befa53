"""How many tickets a generator holds at a time: from what its engine says of itself, and from what the others need. Pure.

Guarantees: the limit stays in 1..`most`; it grows only while nothing queues in the engine, engine and KV cache have room for
what is added and the pod is at its limit; it falls, to a half at most at a time, when completions go on queueing or the KV cache
is full. So a ticket is claimed where it is run at once, and a slow pod holds few, a fast one many.

An engine runs `generator.max_num_seqs` completions at most. When completions queue beside fewer, those that run are all it
can run: that is remembered instead, until after `PROBE_LOOKS` more is tried, as it changes with the lengths of completions.
vLLM reports preemptions only with its statistics on, which cost throughput. What completions need of the KV cache says as
much: at `KV_FULL` of it some are about to be put off, or have been.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from services.config import RunConfig
from services.generator.engines.base import Gauges

Reason = Literal["start", "room", "queue", "kv"]
REASONS: tuple[Reason, ...] = get_args(Reason)

POLL_S = 0.25  # between looks at the engine: several iterations, and short against a completion
SLACK_SHARE = 4  # one more completion for so many that run: on their way into the engine, or at hand when one has ended
PATIENCE_LOOKS = 2  # looks that a queue has to last
KV_FULL, KV_ROOM = 0.95, 0.9  # the limit falls above the one; it grows while what is added stays below the other
KV_CALM_LOOKS = 40  # without growth after the KV cache was full: completions have to get long before it shows again
PROBE_LOOKS = 120  # half a minute, then more is tried again


@dataclass(frozen=True)
class Limit:
    """How many tickets to hold, and what is remembered from look to look."""

    groups: int
    reason: Reason = "start"
    """Why it was last set."""
    capacity: int = 0
    """Completions that ran while others queued; 0: not known to be below `generator.max_num_seqs`."""
    calm: int = 0
    """Looks since the limit last fell, or a queue was last seen that could not be shortened."""
    queue: tuple[int, int] = (0, 0)
    """Of the queue there is now: looks it has lasted, completions that ran when it began."""
    tokens: int = 0
    """Tokens the engine had made."""


@dataclass(frozen=True)
class Bounds:
    """What does not change while a pod lives."""

    most: int
    """Groups. They end raggedly, so that more of them than fit at once are needed to keep an engine full."""
    seats: int
    """Completions an engine runs at a time at most."""
    group_size: int

    @classmethod
    def of(cls, config: RunConfig) -> Bounds:
        """Those of a run's generators."""
        seats, group_size = config.generator.max_num_seqs, config.sampling.group_size
        return cls(config.generator.max_concurrent_groups or max(1, 2 * seats // group_size), seats, group_size)

    @property
    def runnable(self) -> int:
        """Groups that fill an engine if its KV cache holds them, with what is to be at hand: where the limit starts."""
        return min(self.most, max(1, (self.seats + self.seats // SLACK_SHARE) // self.group_size))


def fair_share(slots: int, generators: int) -> int:
    """Tickets a generator claims before others have had theirs: of a run's slots its part, rounded up."""
    return max(1, -(-slots // max(1, generators)))


def adjust(limit: Limit, gauges: Gauges, held: int, bounds: Bounds) -> Limit:
    """The limit after a look at the engine of a pod that holds `held` tickets.

    An engine that has made no token since the last look (paused, idle, or in a long prefill) tells nothing.
    """
    if gauges.tokens == limit.tokens:
        return limit
    slack = gauges.running // SLACK_SHARE
    most_queued = max(slack, bounds.group_size - 1)  # of a group that has begun the rest may wait
    calm, (looks, before) = limit.calm + 1, limit.queue
    queue = (looks + 1, before if looks else gauges.running) if gauges.queued > most_queued else (0, 0)
    capacity = max(limit.capacity, gauges.running) if limit.capacity and calm < PROBE_LOOKS else 0
    limit = replace(limit, capacity=capacity, calm=calm, queue=queue, tokens=gauges.tokens)
    if gauges.kv_usage >= KV_FULL:
        # Until it holds no more than the limit, the last fall has not had its effect.
        return _fall(limit, min(limit.groups, held) * 3 // 4, "kv") if 0 < held <= limit.groups else limit
    looks, before = queue
    if looks >= PATIENCE_LOOKS and gauges.running:
        if gauges.running > before + slack:  # a prefill that gets on
            return replace(limit, queue=(1, gauges.running))
        excess = -(-(gauges.queued - most_queued) // bounds.group_size)
        limit = replace(limit, capacity=max(before, gauges.running), queue=(looks, gauges.running))  # it has proved to be one
        return _fall(limit, min(limit.groups, held - excess), "queue")
    groups = min(bounds.most, limit.groups + _growth(limit, gauges, held, bounds))
    return replace(limit, groups=groups, reason="room") if groups > limit.groups else limit


def _fall(limit: Limit, wanted: int, reason: Reason) -> Limit:
    return replace(limit, groups=max(1, wanted, limit.groups // 2), reason=reason, calm=0)


def _growth(limit: Limit, gauges: Gauges, held: int, bounds: Bounds) -> int:
    """Groups to add: a quarter, as far as the engine is known to begin them at once and the KV cache holds them."""
    if held < limit.groups or limit.queue[0] or (limit.reason == "kv" and limit.calm < KV_CALM_LOOKS):
        return 0
    capacity = min(limit.capacity or bounds.seats, bounds.seats)
    free = capacity - gauges.running - gauges.waiting
    added = min(max(1, limit.groups // 4), -(-free // bounds.group_size) + capacity // SLACK_SHARE // bounds.group_size)
    if gauges.kv_usage * (held + added) > KV_ROOM * held:
        added = int(held * KV_ROOM / gauges.kv_usage) - held
    return max(0, added)
