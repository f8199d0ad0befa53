"""Keeps a generator on one policy version while an evaluation round of it needs the pod (docs/evaluation.md).

Guarantees: while a round holds this pod, its weights do not change (services/weights/rounds/member.py declines sync rounds).
Waits for: an open round of the version that it holds. Unblocked by: the weight follower, which offers the pod between sync
rounds.
"""

from __future__ import annotations

import structlog

from services.generator.engines.base import Engine
from services.protocol.errors import StoreError
from services.runtime.holding import ROOM
from services.runtime.service import Service

log = structlog.get_logger()


class EvaluationDuty:
    """Whether a round holds this pod, and on which version."""

    def __init__(self, service: Service, engine: Engine) -> None:
        self.version: int | None = None
        """The policy version that this pod is kept on, or None while it trains."""
        self._service, self._engine, self._config = service, engine, service.config
        self._closed = self._ending = False
        alone = self._config.generator.count == 1 and self._config.fleet.scaling == "request"
        self._kept_training = 0 if alone else 1  # generators that train meanwhile; training waits for the only one of a run

    def obstacle(self, version: int) -> str:
        """Return why this pod cannot sample `version` for an environment now, or ""."""
        if self.version != version or self._ending or self._closed:
            return f"does not evaluate policy version {version}"
        return "paused" if self._service.view.paused else ""

    async def offer(self) -> None:
        """Volunteer for an open round of the version held. Called only by the weight follower, never inside a sync round."""
        held = self.version is not None or self._closed or self._service.view.paused
        if not self._config.evaluation.every_steps or held or not self._engine.whole:
            return
        version = self._engine.version
        try:
            admitted = await self._volunteer(version)
        except StoreError as error:  # the next turn volunteers again; until then the pod follows sync rounds
            log.warning("could not volunteer for evaluation", error=str(error))
            return
        if admitted:
            log.info("evaluating", version=version)
            self.version = version
            self._service.say(phase="evaluating", world=0)
            self._service.notifications.notify(ROOM)

    async def goes_on(self) -> bool:
        """Return whether the round still has work for this pod: a ticket, or an environment's turns."""
        return self.version is not None and await self._volunteer(self.version)

    async def _volunteer(self, version: int) -> bool:
        status, given = self._service.status, self._config.evaluation
        return await self._service.store.evaluation.volunteer(
            status.member,
            version,
            status.trainer_fence,
            self._config.fleet.ttl_s,
            self._config.fleet.lease_s,
            given.max_generators,
            self._kept_training,
        )

    def close(self) -> None:
        """Never volunteer again. A round that holds this pod holds it until `end`."""
        self._closed = True

    def stop_serving(self) -> None:
        """Refuse further turns of environments, so that those in progress can be handed back before `end`."""
        self._ending = True

    async def end(self) -> None:
        """Return to training, unless the pod is ending."""
        version = self.version
        if version is None:
            return
        try:
            await self._service.store.evaluation.resign(self._service.status.member)
        finally:
            self._ending = False  # without Redis it is still a volunteer, and serves the round
        log.info("returning to training", version=version)
        self.version = None
        if not self._closed:
            self._service.say(phase="ready", world=self._engine.world)
