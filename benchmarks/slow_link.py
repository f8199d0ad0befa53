"""A link between regions, emulated in user space: TCP connections with a limited bandwidth and a delay.

All connections through one `SlowLink` share its bandwidth in each direction; each byte arrives half a round trip after it was
sent. So a request takes a round trip, and so does opening a connection, since the first byte waits for it. Slow start and loss
are not modelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Self

CHUNK_BYTES = 1 << 16


class SlowLink:
    """Runs proxies in a separate thread; `port_to` opens one."""

    def __init__(self, bits_per_s: float, round_trip_s: float) -> None:
        self._byte_s, self._delay_s, self._round_trip_s = 8 / bits_per_s, round_trip_s / 2, round_trip_s
        self._free = [0.0, 0.0]  # when each direction has sent what it was given
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow-link", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def port_to(self, port: int) -> int:
        """Return a local port that leads over the link to the local port `port`."""

        async def serve() -> int:
            server = await asyncio.start_server(lambda r, w: self._connect(r, w, port), "127.0.0.1", 0)
            return server.sockets[0].getsockname()[1]

        return asyncio.run_coroutine_threadsafe(serve(), self._loop).result(10)

    async def _connect(self, near: asyncio.StreamReader, answers: asyncio.StreamWriter, port: int) -> None:
        await asyncio.sleep(self._round_trip_s)
        far, requests = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._carry(near, requests, 0), self._carry(far, answers, 1))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: int) -> None:
        """Read as fast as the link sends, and deliver in order after the delay."""
        arriving: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                at, data = await arriving.get()
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                if not data:
                    sink.close()
                    return
                sink.write(data)
                await sink.drain()

        delivering = asyncio.create_task(deliver())
        try:
            data = b"-"
            while data:
                data = await source.read(CHUNK_BYTES)
                self._free[direction] = max(time.monotonic(), self._free[direction]) + len(data) * self._byte_s
                sent = self._free[direction]
                arriving.put_nowait((sent + self._delay_s, data))
                await asyncio.sleep(max(0.0, sent - time.monotonic()))
            await delivering
        finally:
            delivering.cancel()
