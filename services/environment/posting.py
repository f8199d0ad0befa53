"""Posts requests to generators over HTTP/1.1, on connections that are kept.

Guarantees: a reply is whole, or `NoReply` is raised; a call that is cancelled closes its connection, so that the generator
stops sampling. A request may be sent twice, if a kept connection turns out to be closed.
A general client would do; httpx took a third of the pod's CPU time.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urlsplit

CONNECT_S = 5.0
HEAD_BYTES = 1 << 16  # of a reply's status and headers
REPLY_BYTES = 64 << 20
"""Most bytes of a reply: the tokens of a turn with their logprobs, or an error."""


class NoReply(Exception):
    """A generator cannot be reached, or disappeared before its reply was complete."""


class Posted(NamedTuple):
    """A reply."""

    status: int
    body: bytes


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Poster:
    """Posts with a bearer token, any number of requests at a time."""

    def __init__(self, token: str, trusted: ssl.SSLContext, server_name: str = "") -> None:
        """`trusted` and `server_name` verify the server over TLS; the name defaults to the host's."""
        self._token, self._trusted, self._server_name = token, trusted, server_name
        self._kept: dict[str, list[_Connection]] = {}  # by base URL

    async def post(self, base: str, path: str, body: bytes) -> Posted:
        """Post to `base` + `path` and return the reply. Raises `NoReply`."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {urlsplit(base).netloc}\r\nAuthorization: Bearer {self._token}\r\n"
            f"Content-Type: application/msgpack\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        kept = self._kept.setdefault(base, [])
        while kept:
            one = kept.pop()
            if one.reader.at_eof() or one.writer.is_closing():
                one.writer.close()
                continue
            try:
                return await self._exchange(base, one, head, body)
            except NoReply:
                break  # the server has just closed it: try once more on a new one
        return await self._exchange(base, await self._connect(base), head, body)

    def keep_only(self, bases: Collection[str]) -> None:
        """Close the unused connections to all other servers: nobody will notice that these have gone."""
        for base in self._kept.keys() - bases:
            for one in self._kept.pop(base):
                one.writer.close()

    def close(self) -> None:
        """Close the connections that are not in use."""
        self.keep_only(())

    async def _connect(self, base: str) -> _Connection:
        place = urlsplit(base)
        secure = place.scheme == "https"
        try:
            async with asyncio.timeout(CONNECT_S):
                return _Connection(
                    *await asyncio.open_connection(
                        place.hostname,
                        place.port or (443 if secure else 80),
                        limit=HEAD_BYTES,
                        ssl=self._trusted if secure else None,
                        server_hostname=(self._server_name or place.hostname) if secure else None,
                    )
                )
        except (OSError, TimeoutError) as error:
            raise NoReply(repr(error)) from None

    async def _exchange(self, base: str, one: _Connection, head: bytes, body: bytes) -> Posted:
        try:
            one.writer.write(head + body)
            status, length, kept = _read_head(await one.reader.readuntil(b"\r\n\r\n"))
            reply = await one.reader.readexactly(length)
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
            one.writer.close()
            raise NoReply(repr(error)) from None
        except BaseException:  # cancellation: what still arrives is not a reply to the next request
            one.writer.close()
            raise
        if kept:
            self._kept.setdefault(base, []).append(one)
        else:
            one.writer.close()
        return Posted(status, reply)


def _read_head(head: bytes) -> tuple[int, int, bool]:
    """Return status, length of the body, and whether the connection is kept.

    Raises ValueError for a head that no generator sends.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status = first.split(" ")[:2]
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    length = int(fields["content-length"]) if "content-length" in fields else -1
    if version != "HTTP/1.1" or not 0 <= length <= REPLY_BYTES or "transfer-encoding" in fields:
        raise ValueError(f"the reply begins with {first!r} and has no usable length")
    return int(status), length, fields.get("connection", "").lower() != "close"
