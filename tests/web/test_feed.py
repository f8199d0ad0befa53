"""Frames for many pages: a slow page misses some, and a page that receives none is disconnected."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Scope

from services.web.feed import EventResponse, Feed
from tests.support.harness import wait_until

SCOPE: Scope = {"type": "http", "asgi": {"spec_version": "2.3"}}


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_slow_page_misses_frames_and_gets_the_last() -> None:
    feed, slow, quick = Feed(), list[bytes](), list[bytes]()
    open_gate = asyncio.Event()

    async def read(into: list[bytes], gate: asyncio.Event | None = None) -> None:
        async for frame in feed.subscribe():
            into.append(frame)
            if gate:
                await gate.wait()

    readers = [asyncio.create_task(read(slow, open_gate)), asyncio.create_task(read(quick))]
    await wait_until(lambda: feed.watchers == 2)
    for i in range(50):
        await feed.publish("frame", b"%d" % i)
        await wait_until(lambda i=i: len(quick) == i + 1)
    open_gate.set()
    await wait_until(lambda: len(slow) == 2)
    await feed.close()
    await asyncio.gather(*readers)
    assert [frame.split()[-1] for frame in slow] == [b"0", b"49"]
    assert len(quick) == 50
    assert feed.watchers == 0


async def test_a_page_that_receives_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.web.feed.TAKE_LIMIT_S", 0.05)
    feed, sent = Feed(), list[Any]()

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # as if its socket were full

    answering = asyncio.create_task(EventResponse(feed.subscribe())(SCOPE, never, send))
    await wait_until(lambda: feed.watchers == 1)
    await feed.publish("frame", b"{}")
    await asyncio.wait_for(answering, 30)
    assert sent == ["http.response.start", "http.response.body"]
    await wait_until(lambda: feed.watchers == 0)
