"""The policy as environments reach it: completions from the run's generators, over HTTP.

Guarantees: a request ends with a completion, or with `GenerationFailed` if no generator would ever serve it; a generator that
drains, restarts or dies costs a delay: the request continues elsewhere, from the tokens returned. Turns of one rollout stay with
one generator while it is there, since it has the rollout's prefix in its cache.
Waits for: a generator that can sample. Unblocked by: the fleet's heartbeats (`follow`).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from dataclasses import replace

import aiohttp
import numpy as np
import structlog
from msgspec import structs

from services.groups.generated import Generated, GenerationFailed, SamplingParameters
from services.groups.records import unpack_partial
from services.http.certificate import shared_name
from services.http.credentials import api_tokens
from services.protocol import codec
from services.protocol.errors import StoreError
from services.protocol.messages import PodStatus
from services.protocol.payloads import GenerationRequest
from services.runtime.loops import Loop, is_set_within
from services.runtime.service import Service

log = structlog.get_logger()

GENERATE = "/v1/generate"
FOLLOW_S = 0.5  # between polls of the fleet
CONNECT_S = 5.0
AVOID_S = 1.0  # for which a generator that refused a request gets no further one
WATCH_S = 2.0  # between checks that the generator asked is still in the fleet


class GeneratorFleet:
    """Samples from the run's generators."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self._service = service
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_tokens(config).operate}", "Content-Type": "application/msgpack"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context(cafile=config.api.ca_file or None)),
        )  # httpx would take ten times as much of the pod's CPU time
        self._server_name = shared_name(config.api) or None  # that the certificate is checked for; None: the host's
        self._pods: dict[str, PodStatus] = {}  # by member: those that generate for training
        self._evaluating: dict[str, PodStatus] = {}  # by member: those that are kept on a version
        self._asked: Counter[str] = Counter()  # by member: requests in progress
        self._avoid: dict[str, float] = {}  # by member: until when
        self._homes: dict[str, str] = {}  # by rollout: member that served its last turn
        self._changed = asyncio.Event()

    @property
    def seats(self) -> int:
        """Number of completions that the current generators run at a time."""
        return len(self._pods) * self._service.config.generator.max_num_seqs

    @property
    def evaluation_seats(self) -> int:
        """Number of completions that the evaluating generators run at a time."""
        return len(self._evaluating) * self._service.config.generator.max_num_seqs

    @property
    def evaluating(self) -> frozenset[int]:
        """Policy versions that generators are kept on, for evaluation."""
        return frozenset(pod.version for pod in self._evaluating.values())

    async def follow(self, loop: Loop) -> None:
        """Keep the list of generators up to date (a supervised loop)."""
        while True:
            try:
                members = await self._service.store.fleet.members(self._service.config.fleet.ttl_s)
                generators = [each for each in members if each.kind == "generator"]
                self._pods = {each.member: each for each in generators if each.phase == "ready"}
                self._evaluating = {each.member: each for each in generators if each.phase == "evaluating"}
                self._forget_gone(generators)
                self._changed.set()
                self._changed.clear()
            except StoreError as error:
                log.warning("the fleet cannot be read", error=str(error))
            loop.progress()
            await self._service.notifications.wait("fleet", timeout=FOLLOW_S)

    def _forget_gone(self, generators: list[PodStatus]) -> None:
        """Drop what is kept for generators that have left the fleet."""
        there = {each.member for each in generators}
        self._avoid = {member: until for member, until in self._avoid.items() if member in there}
        self._asked = Counter({member: count for member, count in self._asked.items() if member in there or count})

    async def sample(
        self,
        request_id: str,
        tokens: list[int],
        seed: int,
        sampling: SamplingParameters,
        rollout: str = "",
        version: int | None = None,
    ) -> Generated:
        """Complete `tokens` with at most `sampling.max_tokens` more; `rollout` names the rollout of this turn.

        `version` is the policy version to evaluate; None: for training. Raises `GenerationFailed`.
        """
        request = GenerationRequest(request_id, np.asarray(tokens, np.int32), seed, sampling.max_tokens, version=version)
        while True:
            pod = await self._choose(rollout, version)
            self._asked[pod.member] += 1
            try:
                status, reply = await self._ask(pod, codec.encode(request))
            finally:
                self._asked[pod.member] -= 1
            if status in (0, 503):
                self._avoid[pod.member] = time.monotonic() + AVOID_S
                continue
            if status != 200:
                raise GenerationFailed(f"{pod.name} refused the request: {reply[:500].decode(errors='replace')}")
            [done] = unpack_partial(reply, 1, sampling.max_tokens)
            if done is not None and done.finish != "aborted":
                self._homes[rollout] = pod.member
                return done
            if done is not None:
                request = structs.replace(request, prefix=reply)
            self._avoid[pod.member] = time.monotonic() + AVOID_S

    def forget(self, rollout: str) -> None:
        """Forget which generator served a rollout that has ended."""
        self._homes.pop(rollout, None)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def _choose(self, rollout: str, version: int | None) -> PodStatus:
        """Return the generator that has the rollout's prefix, or otherwise the least busy one."""
        while True:
            now = time.monotonic()
            pods = self._pods if version is None else {m: pod for m, pod in self._evaluating.items() if pod.version == version}
            able = [pod for member, pod in pods.items() if self._avoid.get(member, 0.0) <= now]
            home = self._homes.get(rollout)
            for pod in able:
                if pod.member == home:
                    return pod
            if able:
                return min(able, key=lambda pod: self._asked[pod.member])
            await is_set_within(self._changed, FOLLOW_S)

    async def _ask(self, pod: PodStatus, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of a generator's answer; status 0: it left the fleet or cannot be reached."""
        post = asyncio.ensure_future(self._post(pod.url, body))
        try:
            while not (await asyncio.wait([post], timeout=WATCH_S))[0]:
                if pod.member not in self._pods and pod.member not in self._evaluating and await self._gone(pod):
                    return 0, b""
            return await post
        except (aiohttp.ClientError, OSError) as error:
            log.info("a generator did not answer", pod=pod.name, error=repr(error))
            return 0, b""
        finally:
            post.cancel()  # which closes its connection, so that the generator stops sampling

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        async with self._http.post(f"{url}{GENERATE}", data=body, server_hostname=self._server_name) as reply:
            return reply.status, await reply.read()

    async def _gone(self, pod: PodStatus) -> bool:
        """Return whether a generator is no longer in the fleet; one that drains still answers."""
        try:
            members = await self._service.store.fleet.members(self._service.config.fleet.ttl_s)
        except StoreError:
            return False
        return all(each.member != pod.member for each in members)


def limited(sampling: SamplingParameters, room: int) -> SamplingParameters:
    """Return the sampling parameters for at most `room` tokens."""
    return replace(sampling, max_tokens=min(sampling.max_tokens, room))
