"""Live figures to every page that is open: one frame at a time, the same bytes for all.

Guarantees: a frame is a whole picture, so a page that is slow misses frames and nothing else; nothing is queued for it. One that
takes nothing for `TAKE_LIMIT_S` is dropped. There are `MAX_WATCHERS` at most.
Waits for: the next frame. Unblocked by: `publish`, at least once a second while the run is looked at, and `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

log = structlog.get_logger()

MAX_WATCHERS = 100  # pages open at a time; each costs a socket and, once a second, a frame
TAKE_LIMIT_S = 10.0  # a page that is alive takes a frame of some kilobytes in much less


class Full(Exception):
    """So many pages are open already."""


class Feed:
    """The last frame, and who waits for the next."""

    def __init__(self) -> None:
        self.watchers = 0
        self._frame, self._number, self._closed = b"", 0, False
        self._changed = asyncio.Condition()

    async def publish(self, name: str, body: bytes) -> None:
        """Give a frame to everybody: an event `name` with the JSON `body`."""
        async with self._changed:
            self._frame = b"event: %s\ndata: %s\n\n" % (name.encode(), body)
            self._number += 1
            self._changed.notify_all()

    async def close(self) -> None:
        """End every watcher, after the frame that was published last."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def watched(self) -> None:
        """Wait until somebody watches, or the feed is closed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.watchers > 0 or self._closed)

    def subscribe(self) -> AsyncIterator[bytes]:
        """Frames from the next one on. Raises `Full`."""
        if self.watchers >= MAX_WATCHERS:
            raise Full(f"{self.watchers} pages are open already: close one")
        return self._frames()

    async def _frames(self) -> AsyncIterator[bytes]:
        self.watchers += 1
        try:
            async with self._changed:
                seen = self._number
                self._changed.notify_all()  # somebody watches
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
    """Server-sent events, to a client that takes them."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        super().__init__(frames, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        """Send frames; end when one is not taken in time."""

        async def within_limit(message: Message) -> None:
            async with asyncio.timeout(TAKE_LIMIT_S):
                await send(message)

        try:
            await super().stream_response(within_limit)
        except TimeoutError:
            log.warning("a page was dropped: it took no frame", limit_s=TAKE_LIMIT_S)
