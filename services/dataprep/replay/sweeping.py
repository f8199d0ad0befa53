"""Deletes payloads in shards that no longer belong to a group (store/calls/payloads.py).

Guarantees: a finished group uses memory until the next sweep at most, even if processes die meanwhile; sweeps of up to one
second take at most a twentieth of this process' time, and longer ones run every 20 s.
Waits for: `PAUSE_S`, or longer after a long sweep; leadership. Unblocked by: time.
"""

from __future__ import annotations

import asyncio
import time

from services.runtime.loops import Loop
from services.runtime.service import Service

PAUSE_S, LONGEST_PAUSE_S = 2.0, 20.0
LIMIT_S = 300.0  # enough for a sweep of millions, or of a slow shard; nothing else waits for it
SHARE = 20  # ratio of a pause to the preceding sweep, which reads all payloads at about 2 us each


async def sweep(service: Service, loop: Loop) -> None:
    """Sweep repeatedly while this process leads. Sweeps by other processes would be harmless but are not needed."""
    loop.limit_s = LIMIT_S
    while True:
        began = time.monotonic()
        state = service.view.state
        if state is not None and state.leader == service.status.member:
            await service.store.payloads.sweep()
        loop.progress()
        await asyncio.sleep(min(max(PAUSE_S, SHARE * (time.monotonic() - began)), LONGEST_PAUSE_S))
