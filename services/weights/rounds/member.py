"""A generator's side of the weight-sync rounds (docs/design.md, section 8; leader.py has the trainer's).

Guarantees: the engine is paused from `ready` until it holds a complete set of weights stamped with its version, or, if it can
receive while sampling, only while it applies what it has received; an engine with a partial update stays paused until a later
round gives it a full one; every acknowledgement names the round's attempt; while the pod evaluates, its weights stay, and it
declines at once a round that includes it; a pod that cannot reach the trainer reports so before a group is formed with it, and
again when it can.
Waits for: the round in Redis, operators. Unblocked by: the trainer (`sync`), the view (`pause`). Unblocks: the pod's pause
(`frozen`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import structlog

from services.protocol.errors import StoreError
from services.protocol.messages import Round
from services.runtime.loops import Fatal, Loop
from services.runtime.service import Service
from services.weights.receiver import TransferFailed, WeightReceiver
from services.weights.rounds.catch_up import CatchUp
from services.weights.rounds.metrics import MemberMetrics

log = structlog.get_logger()

POLL_S = 1.0  # a missed notification costs at most this much
RELEASE_POLL_S = 0.05  # a round takes tenths of a second
WAITS = {"present": "gathered", "joined": "joined", "ready": "paused"}  # what follows an acknowledgement, as named in metrics
REACH_SHARE = 0.5  # of the time that a member has to answer: the trainer learns in time that this pod cannot reach it
REACH_AGAIN_S = 1.0  # a connection takes milliseconds, or slightly longer if a packet is lost


class PinnedVersion(Protocol):
    """Work that keeps the pod on one policy version, so that it declines rounds meanwhile."""

    @property
    def version(self) -> int | None:
        """Return the version the pod is kept on, or None."""
        ...

    async def offer(self) -> None:
        """Offer the pod, on the weights it holds now, for such work."""
        ...


class WeightFollower:
    """Takes part in every round that includes this pod."""

    def __init__(
        self,
        service: Service,
        engine: WeightReceiver,
        metrics: MemberMetrics,
        evaluation: PinnedVersion | None = None,
    ) -> None:
        self.service, self.engine, self.metrics, self._evaluation = service, engine, metrics, evaluation
        self._late = CatchUp(service, engine) if service.config.sync.backend == "store" else None
        self._clock = metrics.sync_clock()
        self._seen: tuple[int, str] = (0, "")
        self._joined_epoch = 0
        self._declined = 0  # the last attempt that this pod took no part in
        self._paused_for_round = False
        self._paused_at, self._catch_ups = 0.0, 0
        self.frozen = False
        """Whether an operator's pause keeps the engine from sampling."""

    async def follow(self, loop: Loop) -> None:
        """Follow rounds and operators' pauses forever."""
        sync = self.service.config.sync
        loop.limit_s = 2 * (sync.answer_s + sync.deadline_s)
        try:
            await self._follow(loop)
        finally:
            if self._late is not None:
                await self._late.close()

    async def _follow(self, loop: Loop) -> None:
        current: Round | None = None
        while True:
            await self._obey_operator()
            current = await self.service.store.fleet.round_of(self.service.status.member, current)
            if current is not None and (current.attempt, current.phase) != self._seen:
                self._seen = (current.attempt, current.phase)
                await self._take_part(current)
            if current is None or not self._counts_on_me(current):
                await self._offer()
                await self._reach_again(current)
                await self._catch_up()
            loop.progress()
            await self.service.notifications.wait("sync", "pause", "evaluation", timeout=POLL_S)

    async def released(self, limit_s: float) -> None:
        """Return when no round includes this pod, or after `limit_s`.

        A member that left during a broadcast would cost the others that round. No later round includes a pod that is draining.
        """
        with contextlib.suppress(TimeoutError, StoreError):
            async with asyncio.timeout(limit_s):
                me = self.service.status.member
                while (current := await self.service.store.fleet.round_of(me)) is not None and self._counts_on_me(current):
                    await asyncio.sleep(RELEASE_POLL_S)

    def _counts_on_me(self, current: Round) -> bool:
        open_for_me = current.phase not in ("done", "failed") and self.service.status.member in current.members
        return open_for_me and current.attempt != self._declined

    async def _offer(self) -> None:
        """Offer the pod for pinned work. Called only here, so that the pod never keeps one version and takes another at the same
        time.
        """
        if self._evaluation is not None:
            await self._evaluation.offer()

    async def _catch_up(self) -> None:
        """Fetch the published weights from the store, if there is one, beside sampling; apply them once they are here."""
        if self._late is None or (self._evaluation is not None and self._evaluation.version is not None):
            return
        try:
            fetched = await self._late.step()
            if fetched is None:
                return
            await self._pause()
            await self.engine.receive(fetched.version)
        except TransferFailed as error:
            self._late.over(error)
            self.metrics.sync_failures.inc()
        else:
            self._late.over()
            self._catch_ups += 1
            self.metrics.catch_ups.inc()
            self._say_held(fetched.version, fetched.fence)
        await self._leave_round()

    def _say_held(self, version: int, fence: int) -> None:
        """Report new weights, and the time and bytes they took."""
        pause_s, nbytes = time.monotonic() - self._paused_at, self.engine.fetched_bytes
        self.metrics.pause_s.observe(pause_s)
        took = {"pause_s": pause_s, "catch_ups": float(self._catch_ups)}
        if nbytes is not None:
            self.metrics.fetched_bytes.inc(nbytes)
            took["bytes"] = float(nbytes)
        self.service.say(phase="ready", version=version, trainer_fence=fence, weights=took)

    async def _reach(self, current: Round) -> None:
        """Check that the group's rendezvous, if it has one, can be reached.

        Raises `TransferFailed` after telling the fleet, so that later rounds exclude this pod until it reports otherwise.
        """
        if not current.port:  # a store needs no connection
            return
        limit_s = REACH_SHARE * self.service.config.sync.answer_s
        reached, place = await reachable(current.host, current.port, limit_s), f"{current.host}:{current.port}"
        self.service.say(unreached="" if reached else place)
        if not reached:
            await self.service.store.fleet.beat(self.service.status, self.service.config.fleet.ttl_s)  # the trainer reads it next
            raise TransferFailed(
                f"cannot reach the trainer at {place} within {limit_s:g} s: check sync.host, name service and network policies"
            )

    async def _reach_again(self, current: Round | None) -> None:
        """Poll the rendezvous of rounds that exclude this pod, and report when it can be reached."""
        if current is None or not self.service.status.unreached:
            return
        if await reachable(current.host, current.port, REACH_AGAIN_S):
            log.info("the trainer is reachable again", host=current.host, port=current.port)
            self.service.say(unreached="")

    async def _take_part(self, current: Round) -> None:
        me = self.service.status.member
        if not self._counts_on_me(current):
            self._clock.enter("")
            await self._leave_round()
            return
        if reason := self._why_decline():
            self._declined = current.attempt
            await self.service.store.fleet.acknowledge(me, current.attempt, "declined", reason)
            return
        self._clock.enter(current.phase)
        try:
            match current.phase:
                case "gather":
                    await self._reach(current)
                    stage = "present"
                case "join":
                    await self.engine.join(current, current.members[me])
                    self._joined_epoch, stage = current.epoch, "joined"
                case "pause":
                    if self._joined_epoch != current.epoch:
                        raise TransferFailed(f"this pod is not in the group of epoch {current.epoch}")
                    if not self.engine.stages:
                        await self._pause()
                    stage = "ready"
                case "transfer":
                    if self.engine.stages:
                        await self._obeying(self.engine.stage(current.version))
                        await self._pause()
                    await self.engine.receive(current.version)
                    if self.service.status.version < 0:
                        log.info("synced", member=me, version=current.version, epoch=current.epoch)
                    self._say_held(current.version, current.trainer_fence)
                    await self._leave_round()
                    await self._offer()  # before the acknowledgement reaches the trainer, so that no later round can come first
                    stage = "applied"
                case phase:
                    raise Fatal(f"unknown round phase {phase!r}: run trainer and generators from the same version")
        except TransferFailed as error:
            log.warning("weight-sync round failed on this pod", attempt=current.attempt, phase=current.phase, error=str(error))
            self._joined_epoch = 0
            self._clock.enter("")
            self.metrics.sync_failures.inc()
            await self.service.store.fleet.acknowledge(me, current.attempt, "failed", str(error)[:300])
            return
        self._clock.enter(WAITS.get(stage, ""))
        await self.service.store.fleet.acknowledge(me, current.attempt, stage)

    def _why_decline(self) -> str:
        """Return why the pod takes no part in rounds now, or an empty string."""
        if self._evaluation is not None and self._evaluation.version is not None:
            return f"evaluating version {self._evaluation.version}"
        return "fetching weights from the store" if self._late is not None and self._late.busy else ""

    async def _pause(self) -> None:
        self._paused_at = time.monotonic()
        await self.engine.pause()
        self._paused_for_round = True

    async def _leave_round(self) -> None:
        """Continue with complete weights: the new ones, or the old ones if the round continued without this pod."""
        if not self.engine.whole:
            self.service.say(phase="unsynced", version=-1)
            return
        if self._paused_for_round:
            self._paused_for_round = False
            if not self.frozen:
                await self.engine.resume()
        self.service.notifications.notify("version")

    async def _obeying(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a long task while the engine samples, and obey operators meanwhile."""
        working = asyncio.create_task(work)
        try:
            while not working.done():
                await self._obey_operator()
                ring = asyncio.create_task(self.service.notifications.wait("pause", timeout=POLL_S))
                await asyncio.wait((working, ring), return_when=asyncio.FIRST_COMPLETED)
                ring.cancel()
            await working
        finally:
            working.cancel()

    async def _obey_operator(self) -> None:
        wanted = self.service.view.paused
        if wanted == self.frozen:
            return
        if wanted:
            await self.engine.pause()
        elif self.engine.whole and not self._paused_for_round:
            await self.engine.resume()
        self.frozen = wanted
        self.service.notifications.notify("frozen")
        log.info("frozen" if wanted else "resumed")


async def reachable(host: str, port: int, limit_s: float) -> bool:
    """Return whether something listens there, within `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # unknown name, connection refused or no route; includes timeouts
        return False
    writer.close()
    return True
