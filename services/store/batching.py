"""Joins calls that are made while earlier ones are in flight, and splits lists that are too long for one call.

Guarantees: every call gets its own answer or error; at most `max_calls` joint calls are in flight, so a busy pod sends a few
large requests over few connections, and an idle one does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def pieces(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Yield the items in order, `size` at a time."""
    return (items[first : first + size] for first in range(0, len(items), size))


class Batcher(Generic[Item, Answer]):
    """Batches calls: `call(items)` answers several at once, in order; its error is the error of each."""

    def __init__(self, call: Callable[[list[Item]], Awaitable[list[Answer]]], max_items: int, max_calls: int) -> None:
        self._call, self._max_items, self._max_calls = call, max_items, max_calls
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._busy = 0  # calls in flight
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, item: Item) -> Answer:
        """Return the answer to one item. A cancelled caller does not know whether the item was sent."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._busy < self._max_calls:
            self._busy += 1
            task = asyncio.create_task(self._work(), name="batched calls")
            self._tasks.add(task)  # asyncio itself holds only a weak reference
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _work(self) -> None:
        try:
            while batch := self._next():
                await self._answer(batch)
        finally:
            self._busy -= 1  # no await since the last check of the queue, so that no item waits for a worker that has ended

    def _next(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        self._waiting = [(item, future) for item, future in self._waiting if not future.done()]  # drop cancelled items
        batch, self._waiting = self._waiting[: self._max_items], self._waiting[self._max_items :]
        return batch

    async def _answer(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._call([item for item, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        except Exception as error:  # any error must reach the callers
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        finally:
            for _, future in batch:  # when the joint call is cancelled
                future.cancel()
