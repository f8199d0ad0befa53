"""A generator's side of the weight-sync rounds (docs/design.md, section 8; the sender's is services/trainer/sync.py).

Guarantees: the engine is paused from `ready` until it holds a whole set of weights with its version stamped; an engine with
half an update stays paused until a later round gives it a full one; every acknowledgement names the round's attempt.
Waits for: the round in Redis. Unblocked by: the trainer (`sync`).
"""

from __future__ import annotations

import structlog

from services.generator.engine import Engine, EngineDead, TransferFailed
from services.protocol.messages import Round
from services.runtime.loops import Broken, Fatal, Loop
from services.runtime.service import Service

log = structlog.get_logger()

LOOK_S = 1.0  # a missed ring costs at most this much


class WeightFollower:
    """Takes part in every round that counts on this pod."""

    def __init__(self, service: Service, engine: Engine) -> None:
        self.service, self.engine = service, engine
        self._seen: tuple[int, str] = (0, "")
        self._joined_epoch = 0
        self._paused_for_round = False
        self._paused_by_operator = False

    async def follow(self, loop: Loop) -> None:
        """Follow rounds and operators' pauses for ever."""
        loop.limit_s = 2 * (self.service.config.sync.join_deadline_s + self.service.config.sync.transfer_deadline_s)
        while True:
            try:
                await self._obey_operator()
                current, _ = await self.service.store.round()
                if current is not None and (current.attempt, current.phase) != self._seen:
                    self._seen = (current.attempt, current.phase)
                    await self._take_part(current)
            except EngineDead as error:  # a stuck engine that lived on would keep its leases for ever
                raise Broken(str(error)) from None
            loop.progress()
            await self.service.bell.wait("sync", "control", timeout=LOOK_S)

    async def _take_part(self, current: Round) -> None:
        me = self.service.status.member
        if current.phase in ("done", "failed") or me not in current.members:
            await self._leave_round()
            return
        try:
            match current.phase:
                case "gather":
                    stage = "present"
                case "join":
                    await self.engine.join(current, current.members[me])
                    self._joined_epoch, stage = current.epoch, "joined"
                case "pause":
                    if self._joined_epoch != current.epoch:
                        raise TransferFailed(f"is not in the group of epoch {current.epoch}")
                    await self._pause()
                    stage = "ready"
                case "transfer":
                    await self.engine.receive(current.version)
                    self.service.say(phase="ready", version=current.version)
                    await self._leave_round()
                    stage = "applied"
                case phase:
                    raise Fatal(f"unknown round phase {phase!r}: trainer and generator are of different versions")
        except TransferFailed as error:
            log.warning("round failed here", attempt=current.attempt, phase=current.phase, error=str(error))
            self._joined_epoch = 0
            await self.service.store.acknowledge(me, current.attempt, "failed", str(error)[:300])
            return
        await self.service.store.acknowledge(me, current.attempt, stage)

    async def _pause(self) -> None:
        await self.engine.pause()
        self._paused_for_round = True

    async def _leave_round(self) -> None:
        """Go on, with whole weights: the new ones, or the old ones when the round went on without this pod."""
        if not self.engine.whole:
            self.service.say(phase="unsynced", version=-1)
            return
        if self._paused_for_round:
            self._paused_for_round = False
            if not self._paused_by_operator:
                await self.engine.resume()
        self.service.bell.ring("version")

    async def _obey_operator(self) -> None:
        wanted = self.service.view.paused
        if wanted == self._paused_by_operator:
            return
        if wanted:
            await self.engine.pause()
        elif self.engine.whole and not self._paused_for_round:
            await self.engine.resume()
        self._paused_by_operator = wanted
        log.info("paused" if wanted else "resumed")
