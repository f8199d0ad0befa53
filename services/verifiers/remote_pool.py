"""All verifiers of a run that are services, `http` and `judge`, over one pool of connections.

Guarantees: while a service is unavailable, groups are held and requests repeated, with growing, jittered pauses, until
`GIVE_UP_S` have passed; then the groups fail for good, with the reason. A group gets the verdicts of all services of its prompt
source, each checked (results.py), or one `VerifierFailure`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from services.config.data import Source
from services.config.verifiers import HttpConfig, JudgeConfig, VerifierConfig
from services.verifiers.base import Job, VerifierFailure
from services.verifiers.connection import GIVE_UP_S, MOST_REQUESTS, ServiceConnection
from services.verifiers.http import HttpVerifier
from services.verifiers.results import Verdict, fault_of
from services.verifiers.together import together

if TYPE_CHECKING:
    from services.verifiers.judge import JudgeVerifier


class RemotePool:
    """Scores groups with those verifiers of their prompt source that are services."""

    def __init__(
        self,
        verifiers: Sequence[tuple[str, VerifierConfig]],
        sources: Sequence[Source],
        give_up_s: float = GIVE_UP_S,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        """`verifiers` have names; `sources` are all possible sources."""
        self._give_up_s, self._most_requests = give_up_s, most_requests
        self._verifiers = [(name, each) for name, each in verifiers if isinstance(each, HttpConfig | JudgeConfig)]
        self._sources = {source.name: source for source in sources}
        self._http: httpx.AsyncClient | None = None
        self._connections: dict[str, ServiceConnection] = {}
        self._scorers: dict[str, HttpVerifier | JudgeVerifier] = {}

    async def start(self) -> None:
        """Read tokens and compile templates; no service needs to be up yet. Raises `VerifierFailure`."""
        if not self._verifiers:
            return
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log a line for each request, with its address
        kept = httpx.Limits(max_connections=None, max_keepalive_connections=self._most_requests * len(self._verifiers))
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._http = httpx.AsyncClient(timeout=None, limits=kept, cookies=no_cookies)
        for name, verifier in self._verifiers:
            connection = ServiceConnection(name, verifier, self._http, self._give_up_s, self._most_requests)
            self._connections[name] = connection
            try:
                connection.start()
                if isinstance(verifier, HttpConfig):
                    self._scorers[name] = HttpVerifier(name, verifier, connection)
                else:
                    from services.verifiers.judge import JudgeVerifier  # needs jinja2, which only generators install

                    self._scorers[name] = JudgeVerifier(name, verifier, connection)
            except (ValueError, VerifierFailure) as error:
                await self.close()
                raise VerifierFailure(f"verifier {name!r}: {error}") from None

    async def score(self, job: Job) -> dict[str, Verdict]:
        """Map the services of a group's source to their verdicts. Raises `VerifierFailure`."""
        asked = [(name, verifier) for name, verifier in self._verifiers if verifier.scores(job.source)]
        if not asked:
            return {}
        try:
            fields = job.fields(self._sources[job.source])
        except (msgspec.DecodeError, ValueError) as error:
            raise VerifierFailure(f"the ticket's row or answer cannot be read: {error}") from None
        for name in ("completions", "replies"):
            fields[name] = [text.encode("utf-8", "replace").decode() for text in fields[name]]  # no lone surrogates
        verdicts = await together([self._verdict(name, verifier, fields) for name, verifier in asked])
        return dict(zip((name for name, _ in asked), verdicts, strict=True))

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.aclose()

    @property
    def waiting(self) -> str:
        """Return which service is waited for, since when and why, or "" if all answer."""
        return "; ".join(filter(None, (connection.waiting for connection in self._connections.values())))

    async def _verdict(self, name: str, verifier: HttpConfig | JudgeConfig, fields: Mapping[str, Any]) -> Verdict:
        connection = self._connections[name]
        with connection.group() as silence:
            try:
                verdict = await self._scorers[name].score(fields, silence)
            except ValueError as error:
                raise VerifierFailure(f"verifier {name!r} failed: {connection.redacted(str(error))}") from None
        if fault := fault_of(verdict, len(fields["completions"]), verifier.bounds):
            raise VerifierFailure(f"verifier {name!r} failed: {fault}")
        return verdict
