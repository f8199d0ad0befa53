"""Distinguishes a request that a client retries from a new one.

Guarantees: a request that an SDK of OpenAI or Anthropic resends after a time limit or a lost connection gets the turn of the
request that it repeats, whether that turn is running or answered. Requests that are not resent get their own turns, even equal
ones.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from services.environment.door.turns import RolloutOver, TurnReply

RETRIES = "x-stainless-retry-count"
"""Header in which both SDKs count how often a request was resent."""
KEPT_TURNS = 64
"""Answered turns of a rollout that a resent request may still ask for: clients resend within seconds."""

Gone = Callable[[], Awaitable[bool]]


@dataclass(slots=True, eq=False)
class AskedTurn:
    """A turn that a request began, and its last requester."""

    digest: bytes
    attempt: int  # the retry count of whoever asked last
    gone: Gone  # whether that client has closed its connection
    turn: asyncio.Task[TurnReply]
    base: dict[str, Any]  # fields that all forms of its reply share, such as its identifier
    unread: bool | None = None  # whether its client had disconnected when its reply was ready; None: it is not ready


class AskedTurns:
    """The turns of one rollout that resent requests may ask for."""

    def __init__(self) -> None:
        self._turns: list[AskedTurn] = []  # in the order in which they began
        self._closed = False

    async def resent(self, digest: bytes, attempt: int, gone: Gone) -> AskedTurn | None:
        """Return the turn that a resent request repeats; None if the request is the first to arrive.

        Of several, prefer one whose client has disconnected: a client that still waits, or has its reply, does not retry.
        """
        equal = [each for each in self._turns if each.digest == digest and each.attempt < attempt]
        left = [await each.gone() if each.unread is None else each.unread for each in equal]
        ranked = sorted(zip(equal, left, strict=True), key=lambda pair: (not pair[1], pair[0].turn.done()))
        # others may have taken one meanwhile
        found = next((each for each, _ in ranked if each.attempt < attempt and each in self._turns), None)
        if found is not None:
            found.attempt, found.gone, found.unread = attempt, gone, None
        return found

    def begin(
        self, digest: bytes, attempt: int, gone: Gone, turn: Coroutine[Any, Any, TurnReply], base: dict[str, Any]
    ) -> AskedTurn:
        """Begin a turn, which continues even if its client disconnects. Raises `RolloutOver`."""
        if self._closed:  # while the body of its request arrived
            turn.close()
            raise RolloutOver("the rollout has ended")
        asked = AskedTurn(digest, attempt, gone, asyncio.create_task(turn), base)
        self._turns.append(asked)
        asked.turn.add_done_callback(lambda done: self._ended(asked, done))
        return asked

    async def reply(self, asked: AskedTurn) -> TurnReply:
        """Return the reply of a turn. Raises what the turn raises, and `RolloutOver` if the rollout ends first."""
        gone = asked.gone
        try:
            reply = await asyncio.shield(asked.turn)
        except asyncio.CancelledError:
            if asked.turn.cancelled():  # by `close`; the server would log a cancelled request with a traceback
                raise RolloutOver("the rollout has ended") from None
            raise
        if asked.gone is gone:  # nobody has asked for it again
            asked.unread = await gone()
        return reply

    async def close(self) -> None:
        """Cancel the running turns, which nobody will read, and begin no others."""
        self._closed = True
        under_way = [each.turn for each in self._turns if not each.turn.done()]
        for turn in under_way:
            turn.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _ended(self, asked: AskedTurn, done: asyncio.Task[TurnReply]) -> None:
        """Forget a turn that failed, since it sampled nothing to repeat, and the oldest answered ones."""
        answered = [each for each in self._turns if each.turn.done()]
        if done.cancelled() or done.exception() is not None:
            self._turns.remove(asked)
        elif len(answered) > KEPT_TURNS:
            self._turns.remove(answered[0])


def attempt_of(headers: Mapping[str, str]) -> int:
    """Return how often a request was sent before, according to its header."""
    count = headers.get(RETRIES, "")
    return int(count) if count.isascii() and count.isdigit() and len(count) < 4 else 0


def digest_of(path: str, body: bytes) -> bytes:
    """Return a key that is equal for requests that ask for the same."""
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[-16:]).digest()
