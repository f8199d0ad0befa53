"""Step plans and the payloads they name (functions/steps.lua)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from services.protocol import codec
from services.protocol.codec import CorruptMessage
from services.protocol.errors import Damaged, StoreError
from services.protocol.messages import RankPlan, StepPlan
from services.protocol.payloads import Payload
from services.store.batching import pieces
from services.store.facet import Facet
from services.store.payloads import FETCHED_TOGETHER

REQUESTS_UNDER_WAY = 2  # concurrent requests: the server works on one while the client works on the other


class Steps(Facet):
    """The steps that dataprep prepares and the trainer commits, publishes and checkpoints."""

    async def prepare(
        self,
        fence: int,
        plan: StepPlan,
        ranks: Sequence[RankPlan],
        oldest_fresh: int = 0,
        variates: Sequence[float] = (),
        gaps_until: int = -1,
    ) -> None:
        """Write the plan of a step and draw its groups from the table. Raises `OutOfOrder`.

        `oldest_fresh`: rejects groups with an older version. `variates`: Exp(1), one per group, if the table has clocks.
        `gaps_until`: filtered groups up to this issue sequence have had their place in this step.
        """
        given = " ".join(repr(float(variate)) for variate in variates)
        args = [" ".join(plan.groups), given, gaps_until, codec.encode(plan), *map(codec.encode, ranks)]
        await self._redis.call("prepare", fence, plan.step, max(oldest_fresh, 0), *args)

    async def plan(self, step: int) -> StepPlan | None:
        """Return the plan of a step, or None if it is not prepared or already retired."""
        raw = await self._redis.ask(self._redis.client.hget(self._keys.step(step), "plan"))
        return None if raw is None else codec.decode(raw, StepPlan)

    async def rank_plan(self, step: int, rank: int) -> RankPlan:
        """Return the rows of one rank. Raises `StoreError` if the step has none for it."""
        return _of_rank(await self._redis.ask(self._redis.client.hget(self._keys.step(step), f"rank:{rank}")), step, rank)

    async def plans(self, step: int, rank: int) -> tuple[StepPlan, RankPlan] | None:
        """Return the plan of a step and the rows of one rank, which were prepared together.

        Returns None and raises like `plan` and `rank_plan`.
        """
        raw, ours = await self._redis.ask(self._redis.client.hmget(self._keys.step(step), "plan", f"rank:{rank}"))
        return None if raw is None else (codec.decode(raw, StepPlan), _of_rank(ours, step, rank))

    async def payloads(self, names: Sequence[str]) -> dict[str, Payload]:
        """Return payloads by name. Raises `Damaged`, which names all that are missing or unreadable."""
        together = FETCHED_TOGETHER * (len(self._payloads.shards) or 1)  # in one request to each server
        requests = list(pieces(names, together))
        found = dict[str, Payload | CorruptMessage]()

        async def fetch(first: int) -> None:
            for piece in requests[first::REQUESTS_UNDER_WAY]:
                found.update(await self._payloads.read(piece))

        await asyncio.gather(*map(fetch, range(REQUESTS_UNDER_WAY)))
        if damaged := {name: str(error) for name, error in found.items() if isinstance(error, CorruptMessage)}:
            raise Damaged(damaged)
        return {name: payload for name, payload in found.items() if isinstance(payload, Payload)}

    async def commit(self, fence: int, step: int) -> bool:
        """Count a step as trained. Returns False if it was committed before. Raises `OutOfOrder`, `Fenced`."""
        return bool(await self._redis.call("commit", fence, step))

    async def discard_damaged(
        self,
        fence: int,
        first: int,
        prepared: int,
        reasons: Mapping[str, str],
        steps: Sequence[tuple[StepPlan, Sequence[RankPlan]]],
    ) -> int:
        """Make dead letters of groups that cannot be trained, each with its reason. Returns how many.

        `first`: the first step that is not in the trainer's weights. `steps`: the steps from there to `prepared` that have any of
        the groups, without them. Raises `OutOfOrder` if another step was prepared meanwhile.
        """
        args: list[str | bytes | int] = [part for pair in reasons.items() for part in pair]
        for plan, ranks in steps:
            args += (plan.step, codec.encode(plan), len(ranks), *map(codec.encode, ranks))
        return int(await self._redis.call("discard_damaged", fence, first, prepared, len(reasons), *args))

    async def publish(self, fence: int, version: int) -> bool:
        """Record that the fleet holds `version`, which frees the slots of its steps. Returns False if it was published before."""
        return bool(await self._redis.call("publish", fence, version))

    async def checkpointed(self, fence: int, step: int) -> None:
        """Record that a checkpoint covers every step up to and including `step`."""
        await self._redis.call("checkpointed", fence, step)

    async def retire(self) -> int:
        """Delete plans and payloads that a checkpoint covers. Returns how many steps were retired."""
        retired = 0
        while await self._redis.call("retire"):
            retired += 1
        return retired


def _of_rank(raw: bytes | None, step: int, rank: int) -> RankPlan:
    if raw is None:
        raise StoreError(f"step {step} was planned without rank {rank}: start as many ranks as trainer.ranks says")
    return codec.decode(raw, RankPlan)
