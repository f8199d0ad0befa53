"""Calls that are made while earlier ones are on their way are joined into one.

Guarantees: every call gets its own answer or error; at most `lanes` joint calls are under way, so a busy pod sends few
large requests over few connections, and an idle one waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Coalescer(Generic[Item, Answer]):
    """`call(items)` answers several at once, in order; an error of it is the error of each."""

    def __init__(self, call: Callable[[list[Item]], Awaitable[list[Answer]]], most: int, lanes: int) -> None:
        self._call, self._most, self._lanes = call, most, lanes
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, item: Item) -> Answer:
        """The answer to one item. A caller who is cancelled does not know whether it was sent."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._tasks) < self._lanes:
            task = asyncio.create_task(self._work(), name="coalesced calls")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            batch = [(item, future) for item, future in batch if not future.done()]
            try:
                answers = await self._call([item for item, _ in batch])
            except Exception as error:  # whatever it is, those who asked must hear of it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
