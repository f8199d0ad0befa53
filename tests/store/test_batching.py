"""Batching: many callers share a few requests, and each gets its own reply."""

from __future__ import annotations

import asyncio

import pytest

from services.store.batching import Batcher
from tests.support.harness import wait_until


async def test_callers_during_a_call_share_the_next_one() -> None:
    batches: list[list[int]] = []
    gate = asyncio.Event()

    async def call(items: list[int]) -> list[int]:
        batches.append(items)
        await gate.wait()
        return [10 * item for item in items]

    calls = Batcher(call, max_items=4, max_calls=1)
    first = asyncio.create_task(calls.ask(0))
    await wait_until(lambda: batches == [[0]])
    others = [asyncio.create_task(calls.ask(i)) for i in range(1, 7)]
    await asyncio.sleep(0)
    others[0].cancel()
    await asyncio.sleep(0)
    gate.set()
    assert await first == 0
    assert await asyncio.gather(*others[1:]) == [20, 30, 40, 50, 60]
    assert batches == [[0], [2, 3, 4, 5], [6]], "item 1 was cancelled before it was sent"


async def test_concurrent_calls_are_limited() -> None:
    under_way = most = 0

    async def call(items: list[int]) -> list[int]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return items

    calls = Batcher(call, max_items=2, max_calls=2)
    for _ in range(2):  # the second time after an idle period
        assert await asyncio.gather(*(calls.ask(i) for i in range(20))) == list(range(20))
        assert most == 2


async def test_an_error_reaches_only_the_callers_of_that_batch() -> None:
    async def call(items: list[int]) -> list[int]:
        if 3 in items:
            raise ValueError("three")
        return items

    calls = Batcher(call, max_items=2, max_calls=1)
    outcomes = await asyncio.gather(*(calls.ask(i) for i in (1, 2, 3, 4, 5)), return_exceptions=True)
    assert [outcome if isinstance(outcome, int) else str(outcome) for outcome in outcomes] == [1, 2, "three", "three", 5]
    with pytest.raises(ValueError, match="three"):
        await calls.ask(3)
    assert await calls.ask(6) == 6
