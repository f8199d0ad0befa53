"""One request to a service.

Guarantees: it ends within its time limit, and no more than a bounded part of the reply is read, whatever the service sends; every
way to fail is one of three errors. No error contains an address, which may hold a secret.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
import time
from email.utils import parsedate_to_datetime

import httpx

from services.config.secrets import read_token
from services.config.verifiers import RemoteVerifier
from services.verifiers.base import VerifierFailure
from services.verifiers.results import SHOWN_CHARACTERS

REPLY_BYTES = 16 << 20
"""Maximum number of bytes of a reply: that of a thousand completions with notes of the maximum size."""
EXCERPT_BYTES = 2048  # of the reply of a failed request, which is shown in part
HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
"""Compressed replies are neither requested nor accepted: a small one may decompress to any size."""
AGAIN = (408, 429)
"""Client-error statuses that are retried, in addition to server errors."""


class Unavailable(Exception):
    """The service could not be reached, was too slow, is overloaded or failed: a retry may succeed."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        """`after_s`: how long the service asked to wait."""
        super().__init__(reason)
        self.reason, self.after_s = reason, after_s


class Unauthorized(Exception):
    """The service does not accept the token."""


class UnusableReply(Exception):
    """The service answered, but not with a result; a retry is useless."""


class ServiceToken:
    """The bearer token of a service, from the environment variable or the file that the configuration names.

    It is sent to the service and appears nowhere else; `redacted` removes it from texts of the service, which may repeat it.
    """

    def __init__(self, config: RemoteVerifier) -> None:
        self._place, self._value = config.token, ""

    def read(self) -> None:
        """Read it. Raises `VerifierFailure` for one that is missing or cannot be sent, and keeps the last one."""
        if self._place:
            try:
                self._value = read_token(self._place)
            except ValueError as error:
                raise VerifierFailure(str(error)) from None

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of a request."""
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def redacted(self, text: str) -> str:
        """Return `text` without the token."""
        return text.replace(self._value, "***") if self._value else text


async def post(http: httpx.AsyncClient, url: str, body: bytes, token: ServiceToken, limit_s: float) -> bytes:
    """Return the body of a successful reply. Raises the three errors above, none of which repeats the token."""
    try:
        async with (
            asyncio.timeout(limit_s),
            http.stream("POST", url, content=body, headers={**HEADERS, **token.headers}) as reply,
        ):
            limit = REPLY_BYTES if reply.is_success else EXCERPT_BYTES
            return _judged(reply, await _read(reply, limit), limit, token)
    except TimeoutError:
        raise Unavailable(f"no answer within timeout_s = {limit_s:g}") from None
    except httpx.TransportError as error:
        raise Unavailable(token.redacted(_cause(error))) from None


async def _read(reply: httpx.Response, limit: int) -> bytes:
    """Return the body, or its first bytes, more than `limit`."""
    data = bytearray()
    async for chunk in reply.aiter_raw():
        data += chunk
        if len(data) > limit:
            break
    return bytes(data)


def _judged(reply: httpx.Response, data: bytes, limit: int, token: ServiceToken) -> bytes:
    status = reply.status_code
    if reply.is_success:
        if len(data) > limit:
            raise UnusableReply(f"answered with more than {limit} bytes")
        if reply.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnusableReply("answered with a compressed body, which was not asked for")
        return data
    text = token.redacted(data.decode("utf-8", "replace")).strip()[:SHOWN_CHARACTERS]  # cut last: a part of a token is not found
    said = f"answered {status}" + (f": {text!r}" if text else "")
    if status == 401:
        raise Unauthorized(said)
    if status in AGAIN or status >= 500:
        raise Unavailable(said, _retry_after_s(reply.headers.get("Retry-After", "")))
    raise UnusableReply(said)


def _retry_after_s(text: str) -> float:
    """Return the seconds of a Retry-After header, a number or a date; 0 for none or an unreadable one."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _cause(error: BaseException) -> str:
    """Return why a connection failed, in the words of the operating system if it has any."""
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, ssl.SSLError | socket.gaierror) and one.strerror:
            return one.strerror.lower()
        if isinstance(one, OSError) and one.errno:
            return os.strerror(one.errno).lower()
        one = one.__cause__ or one.__context__
    return str(error).rstrip(".").lower() or type(error).__name__
