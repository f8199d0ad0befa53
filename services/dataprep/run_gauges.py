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
from services.store.records import RunState

POLL_S = 2.0  # well below the 10 s or more between scrapes of Prometheus


class RunGauges:
    """Polls the run and exports what it reads."""

    def __init__(self, service: Service, metrics: RunMetrics) -> None:
        self._service, self._store, self._config, self._metrics = service, service.store, service.config, metrics
        for total in (*metrics.outcomes.values(), metrics.dead_letters):
            total.set(math.nan)  # until it is counted: a rise from 0 would mean that tickets have ended since

    async def follow(self, loop: Loop) -> None:
        """Poll until cancelled."""
        while True:
            state = await self._store.run.state()
            if state is not None:
                self._show_state(state)
                with contextlib.suppress(Busy):  # the run is being restored and cannot be counted
                    await self._count()
            await self._look_at_server()
            await self._look_at_fleet()
            loop.progress()
            await asyncio.sleep(POLL_S)

    def _show_state(self, state: RunState) -> None:
        shown = self._metrics
        shown.steps.set(state.steps)
        numbers = (state.prepared_step + 1, state.committed_step + 1, state.checkpointed_step + 1, state.published_version)
        for mark, number in zip(MARKS, numbers, strict=True):
            shown.marks[mark].set(number)
        shown.slots.set(state.slots)
        shown.slots_used.set(state.slots_used)
        for role, made in shown.paused.items():
            made.set(role in state.paused)
        shown.ended.set(state.ended)
        desired = state.scale.desired(self._config.fleet.scaling, self._config.generator.count)
        shown.wanted.set(math.nan if desired is None else desired)

    async def _count(self) -> None:
        shown = self._metrics
        asked = time.monotonic()
        counted = await self._store.run.audit()
        shown.redis_answer_s.observe(time.monotonic() - asked)
        seen = await self._store.monitor.sizes()
        places = counted | {"claimed": seen.claimed, "queued": counted["tickets"] - seen.claimed}
        for place, made in shown.tickets.items():
            made.set(places[place])
        for outcome, made in shown.outcomes.items():
            made.set(counted.get(f"ledger:{outcome}", 0))
        shown.doubled.set(counted.get("ledger:doubled", 0))
        shown.oldest.set(seen.oldest_ticket_s)
        shown.buffered.set(seen.replay_groups)
        shown.dead_letters.set(seen.dead_letters)

    async def _look_at_server(self) -> None:
        shown, server = self._metrics, await self._store.monitor.server()
        shown.redis_memory.set(server.used_memory)
        shown.redis_limit.set(server.max_memory)
        shown.redis_clients.set(server.clients)
        shown.redis_persists.set(server.persists)

    async def _look_at_fleet(self) -> None:
        heard = Counter(pod.kind for pod in await self._store.fleet.members(self._config.fleet.ttl_s))
        for kind in KINDS:
            self._metrics.pods[kind].set(heard[kind])
