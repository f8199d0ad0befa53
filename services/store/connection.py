"""The connection between store and Redis: functions by name, plain commands, actionable errors.

Guarantees: every call may be repeated after a lost reply, so the client itself retries through a restart of the server; a server
that was replaced by an empty one, or that took over a Cluster's slot, gets the functions again.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import hiredis
from redis.exceptions import NoPermissionError, OutOfMemoryError, RedisError, ResponseError, TimeoutError

from services.protocol.errors import Busy, DifferentRun, Fenced, OutOfOrder, StoreError
from services.protocol.keys import Keys
from services.store.client import Login, check_server, closed, explain, facts, make_client, request_limit_s, shown
from services.store.cluster import SlotOwner
from services.store.functions import library

T = TypeVar("T")


class Connection:
    """Calls functions and plain commands; everything it raises is a `StoreError` or a subclass."""

    def __init__(self, keys: Keys, url: str, login: Login, owner: SlotOwner | None = None, name: str = "") -> None:
        """`owner`: of the run's slot in a Cluster; by default, the server is not a node of one. `name`: added to the address in
        errors.
        """
        self.keys, self.url, self.login, self.owner = keys, url, login, owner
        self.client: Any = make_client(url, login, owner)
        """Redis-py's client, for plain commands, which `ask` awaits. Their type hints allow for replies of any client."""
        self._named = f"{url} {name}".rstrip()
        self._library, code = library()
        self._load = ("FUNCTION", "LOAD", code)

    @classmethod
    async def connect(cls, url: str, run: str, login: Login | str | None = None) -> Self:
        """Connect, check the server and load the functions. Raises `StoreError` within seconds on failure.

        `login` may be a plain password. A server that is full, or cannot write to its disk, refuses to load functions even if it
        has them. What frees its memory must connect nevertheless; if the functions are missing, the first call reports it.
        """
        login = login if isinstance(login, Login) else Login(login or "")
        keys = Keys(run)
        store = cls(keys, url, login, await check_server(url, login, keys.prefix))
        try:
            [loaded] = await store._exchange([store._load])
            if not isinstance(loaded, OutOfMemoryError) and not str(loaded).startswith("MISCONF"):
                store._check_load(loaded)
        except BaseException:  # also if the attempt is cancelled: nobody else would close it
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """Close the connections."""
        await closed(self.client)

    def _check_load(self, reply: Any) -> None:
        """Check the reply to loading the functions. Users without that permission rely on others: the launcher, dataprep and the
        trainer (acl.py).
        """
        if isinstance(reply, ResponseError) and "already exists" not in str(reply) and not isinstance(reply, NoPermissionError):
            raise self._refusal(reply) from None

    async def ask(self, reply: Awaitable[T]) -> T:
        """Await a plain command, with all its attempts for no longer than an outage and one reply, and turn its errors into the
        store's.
        """
        bound = asyncio.timeout(limit_s := request_limit_s())
        try:
            async with bound:
                return await reply
        except RedisError as error:
            raise explain(self._named, error) from None
        except builtins.TimeoutError:
            if not bound.expired():
                raise
            raise explain(self._named, TimeoutError(f"no answer for {limit_s:g} s")) from None

    async def call(self, function: str, *args: Any) -> Any:
        """Call a function of the library."""
        return (await self.send(self.function(function, *args)))[0]

    def function(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Return the command that calls a function. Text may repeat a lone surrogate, which has no encoding: `?` replaces it."""
        encoded = (arg.encode("utf-8", "replace") if isinstance(arg, str) else arg for arg in args)
        return ("FCALL", f"{self._library}_{name}", 1, self.keys.prefix, *encoded)

    async def send(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands in one request. Returns their replies; raises the store's error for the first one that failed."""
        replies = await self._exchange(commands)
        if any(_no_function(reply) for reply in replies):
            # In one request, because the neighbouring commands decide which of a Cluster's masters a load goes to.
            loaded, *replies = await self._exchange([self._load, *commands])
            self._check_load(loaded)
        return self._checked(replies)

    async def at_once(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands as one transaction, so that their replies are of one instant."""
        *_, replies = await self.send(("MULTI",), *commands, ("EXEC",))
        return self._checked(replies)

    def _checked(self, replies: list[Any]) -> list[Any]:
        """Return replies, or raise the store's error for the first one that failed."""
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise self._refusal(reply) from None
        return replies

    async def _exchange(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the replies to commands on one connection, as sent, with errors as values."""
        return await self.ask(self._attempts(commands))

    async def _attempts(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        pool = self.client.connection_pool
        line = await pool.get_connection()

        async def lost(_error: Exception) -> None:
            await line.disconnect(nowait=True)

        try:
            return await line.retry.call_with_retry(partial(_replies, line, commands), lost)
        finally:
            await pool.release(line)

    @property
    def at_owner(self) -> tuple[Any, ...]:
        """Return a command to send along with commands that have no key, which any node of a Cluster would answer.

        Only the owner of the run's slot performs this one and, because its key never exists, not while the slot moves.
        """
        return ("HLEN", self.keys.prefix)

    async def info(self, *sections: str) -> dict[str, str]:
        """Return INFO of the run's server."""
        _, text = await self.send(self.at_owner, ("INFO", *sections))
        return facts(text)

    def _refusal(self, error: ResponseError) -> StoreError:
        if _no_function(error):
            lacking = "does not have the functions of this version yet"
            return StoreError(f"Redis at {shown(self.url)} {lacking}: start dataprep, which loads them")
        kind, _, rest = str(error).partition(" ")
        match kind:
            case "FENCED":
                return Fenced(rest)
            case "OUTOFORDER":
                return OutOfOrder(rest)
            case "BUSY":
                return Busy(f"{rest}: try again in a moment")
            case "DIFFERENT":
                return DifferentRun(f"run {self.keys.name!r} exists with another {rest}: choose another run.name")
            case "REMAINS":
                return DifferentRun(
                    f"Redis holds remains of a run {self.keys.name!r}, whose deletion was interrupted: delete it again with "
                    "--fresh, or choose another run.name"
                )
            case _:
                return explain(self._named, error)


async def _replies(line: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Send commands on a connection of redis-py in one request, and return their replies, with errors as values. A pipeline of
    redis-py would do the same with twice the CPU time, and convert the replies.
    """
    await line.send_packed_command([hiredis.pack_command(command) for command in commands])
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(await line.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies


def _no_function(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and "Function not found" in str(reply)
