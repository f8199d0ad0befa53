"""Whether something listens at an address."""

from __future__ import annotations

import asyncio


async def reachable(host: str, port: int, limit_s: float) -> bool:
    """Return whether something listens there, within `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # unknown name, connection refused or no route; includes timeouts
        return False
    writer.close()
    return True
