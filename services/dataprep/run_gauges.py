"""Exports the state of the run to Prometheus, read from Redis every few seconds.

Guarantees: each poll sends about eight short commands, none of which does more than read the run's counters; a leader and a
standby export the same values.
Waits for: `POLL_S`, or the end of a restore. Unblocked by: time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter

from services.dataprep.metrics import KINDS, MARKS, RunMetrics
from services.protocol.errors import Busy
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.store import Store
from services.store.records import RunState

POLL_S = 2.0  # well below the 10 s or more between scrapes of Prometheus


async def show_run(service: Service, shown: RunMetrics, loop: Loop) -> None:
    """Poll until cancelled."""
    store, ttl_s = service.store, service.config.fleet.ttl_s
    while True:
        state = await store.run.state()
        if state is not None:
            _show_state(service, state, shown)
            with contextlib.suppress(Busy):  # the run is being restored and cannot be counted
                await _count(store, shown)
        server = await store.monitor.server()
        shown.redis_memory.set(server.used_memory)
        shown.redis_limit.set(server.max_memory)
        shown.redis_clients.set(server.clients)
        shown.redis_persists.set(server.persists)
        heard = Counter(pod.kind for pod in await store.fleet.members(ttl_s))
        for kind in KINDS:
            shown.pods[kind].set(heard[kind])
        loop.progress()
        await asyncio.sleep(POLL_S)


def _show_state(service: Service, state: RunState, shown: RunMetrics) -> None:
    shown.steps.set(state.steps)
    numbers = (state.prepared_step + 1, state.committed_step + 1, state.checkpointed_step + 1, state.published_version)
    for mark, number in zip(MARKS, numbers, strict=True):
        shown.marks[mark].set(number)
    shown.slots.set(state.slots)
    shown.slots_used.set(state.slots_used)
    for role, made in shown.paused.items():
        made.set(role in state.paused)
    shown.ended.set(state.ended)
    desired = state.scale.desired(service.config.fleet.scaling, service.config.generator.count)
    shown.wanted.set(math.nan if desired is None else desired)


async def _count(store: Store, shown: RunMetrics) -> None:
    asked = time.monotonic()
    counted = await store.run.audit()
    shown.redis_answer_s.observe(time.monotonic() - asked)
    seen = await store.monitor.sizes()
    places = counted | {"claimed": seen.claimed, "queued": counted["tickets"] - seen.claimed}
    for place, made in shown.tickets.items():
        made.set(places[place])
    for outcome, made in shown.outcomes.items():
        made.set(counted.get(f"ledger:{outcome}", 0))
    shown.doubled.set(counted.get("ledger:doubled", 0))
    shown.oldest.set(seen.oldest_ticket_s)
    shown.buffered.set(seen.replay_groups)
    shown.dead_letters.set(seen.dead_letters)
