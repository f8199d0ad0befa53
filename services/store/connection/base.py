"""The connection between store and Redis: functions by name, plain commands, actionable errors.

Guarantees: every call may be repeated after a lost reply, so the client itself retries through a restart of the server; a server
that was replaced by an empty one, or that took over a Cluster's slot, gets the functions again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from services.protocol.errors import Busy, DifferentRun, Fenced, OutOfOrder, StoreError
from services.protocol.keys import Keys
from services.store.connection.client import Login, check_server, closed, explain, facts, limits, make_client, redis_errors
from services.store.connection.commands import Commands, Subscription
from services.store.connection.fast_connection import FastConnection, limit, redis_error
from services.store.connection.login import AGAIN_S, direct, shown
from services.store.connection.replies import ErrorReply
from services.store.functions import library

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from services.store.connection.cluster import SlotOwner

T = TypeVar("T")

REFUSED = ("OOM", "MISCONF")
"""First words of errors by which a server refuses writes before it looks at them."""


class Connection:
    """Calls functions and plain commands; everything it raises is a `StoreError` or a subclass."""

    def __init__(
        self,
        client: aioredis.Redis | None,
        keys: Keys,
        url: str = "",
        login: Login | None = None,
        owner: SlotOwner | None = None,
    ) -> None:
        """`client`: by default, created for `url` when first needed. `owner`: of the run's slot; None: the server is not a
        node of a Cluster.
        """
        self.keys, self.url, self.login, self.owner = keys, url, login or Login(), owner
        self.commands = Commands(self.send)
        self._client = client
        self._fast = self._direct() if client is None else FastConnection.beside(client)
        self._plain = self._by_redis_py() if self._fast is None else None
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
        store = cls(None, keys, url, login, await check_server(url, login, keys.prefix))
        async with AsyncExitStack() as undone:
            undone.push_async_callback(store.close)  # also if the attempt is cancelled: nobody else would close it
            [loaded] = await store._exchange([store._load])
            if _word(loaded) not in REFUSED:
                store._check_load(loaded)
            undone.pop_all()
        return store

    @property
    def client(self) -> aioredis.Redis:
        """Return redis-py's client, for what the store has no method for."""
        if self._client is None:
            self._client = make_client(self.url, self.login, self.owner)
            if self._fast is not None:
                self._fast.belongs_to(self._client)
        return self._client

    def _direct(self) -> FastConnection | None:
        settings = direct(self.url, self.login, limits())
        return None if settings is None else FastConnection({**settings, "owner": self.owner})

    def _by_redis_py(self) -> Any:
        from services.store.connection.redis_py import plain_client

        return plain_client(self.client)

    async def close(self) -> None:
        """Close the connections."""
        if self._fast is not None:
            self._fast.close()
        if self._client is not None:
            await closed(self._client)

    def _check_load(self, reply: Any) -> None:
        """Check the reply to loading the functions. Users without that permission rely on others: the launcher, dataprep and the
        trainer (acl.py).
        """
        if isinstance(reply, Exception) and "already exists" not in str(reply) and not _no_right(reply):
            raise self._refusal(reply) from None

    async def ask(self, reply: Awaitable[T]) -> T:
        """Await a plain command and turn its errors into the store's."""
        try:
            return await reply
        except redis_errors() as error:
            raise explain(self.url, error) from None

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
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        for error in errors:
            if _no_function(error):
                raise StoreError(
                    f"Redis at {shown(self.url)} does not have the functions of this version yet: start dataprep, which loads "
                    "them"
                ) from None
            raise self._refusal(error) from None
        return replies

    async def at_once(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands as one transaction, so that their replies are of one instant."""
        *_, replies = await self.send(("MULTI",), *commands, ("EXEC",))
        for reply in replies:
            if isinstance(reply, Exception):
                raise self._refusal(reply) from None
        return replies

    def subscription(self) -> Subscription:
        """Return a subscription to channels, without any yet. Its methods raise redis-py's errors (`ask`)."""
        return cast("Subscription", cast("Any", self.client).pubsub())

    async def _exchange(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the replies to commands on one connection, with errors as values."""
        if self._plain is not None:
            return await self.ask(_bounded(_replies(self._plain, commands)))
        assert self._fast is not None
        return await self.ask(self._fast.ask(commands))

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

    def _refusal(self, error: Exception) -> Exception:
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
            case _ if isinstance(error, ErrorReply):
                return explain(self.url, redis_error(error))
            case _:
                return explain(self.url, error) if isinstance(error, redis_errors()) else error


async def _bounded(replies: Awaitable[T]) -> T:
    """Await replies through redis-py, all attempts together for no longer than a `FastConnection` would."""
    async with limit(limits().reply_s + AGAIN_S):
        return await replies


async def _replies(plain: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return replies through redis-py, which supports TLS and unix sockets, in the format of a `FastConnection`."""
    if len(commands) == 1:  # cheaper than a pipeline of one
        from redis.exceptions import ResponseError

        try:
            return [await plain.execute_command(*commands[0])]
        except ResponseError as error:
            return [error]
    async with plain.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        return await pipe.execute(raise_on_error=False)


def _no_function(reply: Any) -> bool:
    return isinstance(reply, Exception) and "Function not found" in str(reply)


def _no_right(error: Exception) -> bool:
    return _word(error) == "NOPERM"


def _word(reply: Any) -> str:
    """Return the first word of an error reply, which names its kind; empty for another reply. redis-py removes the word if it has
    an exception of that kind.
    """
    if isinstance(reply, ErrorReply):
        return reply.word
    if not isinstance(reply, Exception):
        return ""
    from redis.exceptions import NoPermissionError, OutOfMemoryError

    if isinstance(reply, NoPermissionError):
        return "NOPERM"
    return "OOM" if isinstance(reply, OutOfMemoryError) else str(reply).partition(" ")[0]
