"""Helpers for remote verifiers: a pool with a configured service, and groups to score."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from services.config.data import FileSource
from services.protocol.messages import Row
from services.verifiers.base import Job
from services.verifiers.connection import GIVE_UP_S, MOST_REQUESTS
from services.verifiers.remote_pool import RemotePool
from tests.support.verifiers import verifier

SOURCE = FileSource(kind="jsonl", path="/unused")
ROW = Row([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}], {"level": 3, "topic": "sums"})


@asynccontextmanager
async def asking(
    kind: str, url: str, name: str = "", give_up_s: float = GIVE_UP_S, most_requests: int = MOST_REQUESTS, **settings: Any
) -> AsyncIterator[RemotePool]:
    """Yield a started pool with one service."""
    pool = RemotePool([(name or kind, verifier(kind, url=url, **settings))], [SOURCE], give_up_s, most_requests)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def group(*texts: str, answer: str = "4") -> Job:
    """Return a group of completions of one prompt."""
    return Job("main", list(texts), answer, msgspec.json.encode(ROW).decode(), ["stop"] * len(texts))
