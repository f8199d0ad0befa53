"""Sends live figures to every open page: one frame at a time, the same bytes for all.

Guarantees: each frame is complete, so a slow page only misses frames, and nothing is queued for it. A page that receives nothing
for `TAKE_LIMIT_S` is disconnected. There are at most `MAX_WATCHERS` pages.
Waits for: the next frame. Unblocked by: `publish`, at least once a second while a page is open, and `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

log = structlog.get_logger()

MAX_WATCHERS = 100  # pages open at once; each costs a socket and one frame a second
TAKE_LIMIT_S = 10.0  # a live page receives a frame of a few kilobytes in much less


class Full(Exception):
    """Too many pages are open."""


class Feed:
    """Holds the last frame and the number of watchers."""

    def __init__(self) -> None:
        self.watchers = 0
        self._frame, self._number, self._closed = b"", 0, False
        self._changed = asyncio.Condition()

    async def publish(self, name: str, body: bytes) -> None:
        """Send a frame to all watchers: an event `name` with the JSON `body`."""
        async with self._changed:
            self._frame = b"event: %s\ndata: %s\n\n" % (name.encode(), body)
            self._number += 1
            self._changed.notify_all()

    async def close(self) -> None:
        """End every stream after the frame published last."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def subscribe(self) -> AsyncIterator[bytes]:
        """Return the frames from the next one on. Raise `Full` when too many pages are open."""
        if self.watchers >= MAX_WATCHERS:
            raise Full(f"{self.watchers} pages are already open: close one")
        return self._frames()

    async def _frames(self) -> AsyncIterator[bytes]:
        self.watchers += 1
        try:
            async with self._changed:
                seen = self._number
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda seen=seen: self._number > seen or self._closed)
                    if self._number == seen:
                        return
                    seen, frame = self._number, self._frame
                yield frame
        finally:
            self.watchers -= 1


class EventResponse(StreamingResponse):
    """A response of server-sent events, which ends when the client stops receiving."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        super().__init__(frames, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        """Send frames; end when one is not received in time."""

        async def within_limit(message: Message) -> None:
            async with asyncio.timeout(TAKE_LIMIT_S):
                await send(message)

        try:
            await super().stream_response(within_limit)
        except TimeoutError:
            log.warning("page disconnected: it received no frame in time", limit_s=TAKE_LIMIT_S)
