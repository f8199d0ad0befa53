"""The requests of one verifier to its service, repeated while it is unavailable.

Guarantees: at most `MOST_REQUESTS` are in flight at a time; a request is repeated, after growing and jittered pauses, until the
service answers it or has not answered its group for `GIVE_UP_S`. `waiting` says so while a service is unavailable; no text has
the token or an address's password.
Waits for: a free place among `MOST_REQUESTS`, pauses, the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator

import httpx

from services.config.verifiers import RemoteVerifier
from services.verifiers.attempt import ServiceToken, Unauthorized, Unavailable, UnusableReply, post
from services.verifiers.base import VerifierFailure

GIVE_UP_S = 600.0
"""Seconds after which a ticket becomes a dead letter if the service cannot be reached, is overloaded or fails."""
MOST_REQUESTS = 64
"""Requests of a verifier that one pod has in flight at a time."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Limits of the pause before a request is repeated, which doubles each time: a service that restarts is found within seconds, and
an overloaded one gets few requests."""
AWAY_S, AWAY_TRIES = 5.0, 3
"""A service counts as waited for once it has not answered for this long, or this many requests in a row have failed."""


class Silence:
    """How long a service has not answered, from the first request that failed since its last answer."""

    def __init__(self) -> None:
        self.failures = 0
        self._since = self._answered = float("-inf")

    @property
    def length_s(self) -> float:
        """Seconds since then; 0 if the last request was answered."""
        return time.monotonic() - self._since if self.failures else 0.0

    def answered(self) -> None:
        """Note an answer."""
        self.failures, self._answered = 0, time.monotonic()

    def failed(self, started: float) -> None:
        """Record a failed request. Its wait before the last answer does not count."""
        started = max(started, self._answered)
        self._since = min(self._since, started) if self.failures else started
        self.failures += 1


class ServiceConnection:
    """One verifier's connection to its service."""

    def __init__(self, name: str, config: RemoteVerifier, http: httpx.AsyncClient, give_up_s: float, most_requests: int) -> None:
        self._name, self._config, self._http, self._give_up_s = name, config, http, give_up_s
        self._token = ServiceToken(config)
        self._under_way = asyncio.Semaphore(most_requests)
        self._groups = 0  # with requests now
        self._silence, self._reason = Silence(), ""
        self._not_before = 0.0  # until when the service asked for no requests
        self.address = ""
        """Where the service is, without anything that may be secret."""

    def start(self) -> None:
        """Read the token. Raises `VerifierFailure` for a token or an address that cannot be used."""
        try:
            url = httpx.URL(self._config.url)
        except httpx.InvalidURL as error:
            raise VerifierFailure(f"url is not valid ({error}): fix it") from None
        self.address = str(url.copy_with(userinfo=b"", query=None, fragment=None))
        self._token.read()

    @contextlib.contextmanager
    def group(self) -> Iterator[Silence]:
        """Share the silence of the service among the requests of a group."""
        self._groups += 1
        try:
            yield Silence()
        finally:
            self._groups -= 1

    async def ask(self, url: str, body: bytes, silence: Silence) -> bytes:
        """Post a request until it is answered, and return the answer. Raises `VerifierFailure`."""
        pause_s = FIRST_PAUSE_S
        while True:
            left_s = self._give_up_s - silence.length_s
            if (rest_s := min(self._not_before - time.monotonic(), left_s)) > 0:
                await asyncio.sleep(rest_s + random.uniform(0.0, FIRST_PAUSE_S))
            async with self._under_way:
                started = time.monotonic()
                try:
                    answer = await self._authorized(url, body)
                except Unavailable as error:
                    reason = error.reason
                    left_s = self._failed(error, started, silence)
                except (UnusableReply, Unauthorized) as error:
                    self._answered(silence)
                    raise self._failure(str(error)) from None
                else:
                    self._answered(silence)
                    return answer
            if left_s <= 0:
                raise self._failure(f"{reason}; no answer for {self._give_up_s:g} s", final=True)
            await asyncio.sleep(min(pause_s * random.uniform(0.5, 1.0), left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    @property
    def waiting(self) -> str:
        """Return why and since when the service is waited for, or "" if it answers or is not called."""
        away_s, failures = self._silence.length_s, self._silence.failures
        if not self._groups or (away_s < AWAY_S and failures < AWAY_TRIES):
            return ""
        return f"waiting for verifier {self._name!r} at {self.address}: {self._reason}, for {away_s:.0f} s"

    def redacted(self, text: str) -> str:
        """Return `text` without the token."""
        return self._token.redacted(text)

    async def _authorized(self, url: str, body: bytes) -> bytes:
        """Post once, and again if the token was refused but its file now has another one."""
        headers = self._token.headers
        try:
            return await self._post(url, body)
        except Unauthorized as error:
            try:
                self._token.read()
            except VerifierFailure as failure:
                raise UnusableReply(f"{error}; {failure}") from None
            if self._token.headers == headers:
                raise
            return await self._post(url, body)

    async def _post(self, url: str, body: bytes) -> bytes:
        return await post(self._http, url, body, self._token, self._config.timeout_s)

    def _failed(self, error: Unavailable, started: float, silence: Silence) -> float:
        """Note that the service is unavailable.

        Return the seconds left to the group, which bound the pause that the service requests.
        """
        for each in (self._silence, silence):
            each.failed(started)
        self._reason = error.reason
        left_s = self._give_up_s - silence.length_s
        if error.after_s:
            self._not_before = max(self._not_before, time.monotonic() + min(error.after_s, left_s))
        return left_s

    def _answered(self, silence: Silence) -> None:
        for each in (self._silence, silence):
            each.answered()

    def _failure(self, reason: str, final: bool = False) -> VerifierFailure:
        return VerifierFailure(f"verifier {self._name!r} at {self.address}: {reason}", final)
