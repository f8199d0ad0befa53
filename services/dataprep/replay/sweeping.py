"""Payloads in shards that belong to no group any more are deleted (store/calls/payloads.py).

Guarantees: a group that is over costs memory until the next sweep alone, whoever died meanwhile; sweeps of up to a second take a
twentieth of this process' time at most, longer ones come every 20 s.
Waits for: `PAUSE_S`, or as much longer as a sweep takes long; the lead. Unblocked by: time.
"""

from __future__ import annotations

import asyncio
import time

from services.runtime.loops import Loop
from services.runtime.service import Service

PAUSE_S, LONGEST_PAUSE_S = 2.0, 20.0
LIMIT_S = 300.0  # a sweep of millions, or of a shard that answers late; nothing else waits for it
SHARE = 20  # a pause is so many times as long as the sweep before, which looks at all payloads: some 2 us each


async def sweep(service: Service, loop: Loop) -> None:
    """Sweep for ever, while this process leads: others may, and need not."""
    loop.limit_s = LIMIT_S
    while True:
        began = time.monotonic()
        state = service.view.state
        if state is not None and state.leader == service.status.member:
            await service.store.payloads.sweep()
        loop.progress()
        await asyncio.sleep(min(max(PAUSE_S, SHARE * (time.monotonic() - began)), LONGEST_PAUSE_S))
