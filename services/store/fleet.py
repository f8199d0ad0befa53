"""Fleet membership and the weight-sync rounds (functions/fleet.lua)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from services.protocol.messages import PodStatus, Round
from services.store.facet import Facet, named, ordinal

T = TypeVar("T")


class FleetCalls(Facet):
    """Heartbeats, rounds and acknowledgements."""

    async def beat(self, status: PodStatus, ttl_s: float) -> int:
        """Renew a pod's heartbeat and status. Returns how many generators share the training tickets."""
        shares = int(status.kind == "generator" and status.world > 0 and status.phase != "draining")
        return int(await self._redis.call("beat", status.member, msgspec.json.encode(status), int(ttl_s * 1000), shares))

    async def leave(self, status: PodStatus) -> None:
        """Remove a pod from the fleet."""
        await self._redis.call("leave", status.member)

    async def members(self, ttl_s: float) -> list[PodStatus]:
        """Return the pods with a heartbeat within `ttl_s`."""
        return [status for status, _ in await self.heard(ttl_s)]

    async def heard(self, ttl_s: float) -> list[tuple[PodStatus, float]]:
        """Return the pods with a heartbeat within `ttl_s`, and how many seconds ago it was."""
        reply = await self._redis.call("members", int(ttl_s * 1000))
        found = [(_decoded(raw, PodStatus), int(age_ms) / 1000) for age_ms, raw in zip(reply[::2], reply[1::2], strict=True)]
        return [(status, age_s) for status, age_s in found if status is not None]

    async def set_round(self, fence: int, round: Round) -> None:
        """Open or advance a weight-sync round."""
        body = msgspec.json.encode(msgspec.structs.replace(round, members={}))
        ranks = [part for member in round.members.items() for part in member]
        await self._redis.call("round", fence, ordinal(), round.attempt, round.phase, body, *ranks)

    async def round(self) -> tuple[Round | None, dict[str, tuple[str, str]]]:
        """Return the current round and its acknowledgements: member -> (stage, detail)."""
        sync, ranks = map(named, await self._redis.send(("HGETALL", self._keys.sync), ("HGETALL", self._keys.sync_ranks)))
        current = _decoded(sync.get("round"), Round)
        if current is None:
            return None, {}
        members = {member: int(rank) for member, rank in ranks.items()}
        acks = {key.removeprefix("ack:"): value.decode().partition(" ") for key, value in sync.items() if key.startswith("ack:")}
        said = {member: (stage, detail) for member, (stage, _, detail) in acks.items()}
        return msgspec.structs.replace(current, members=members), said

    async def round_of(self, member: str, held: Round | None = None) -> Round | None:
        """Return the current round, with `member` as its only member if it takes part; `held` itself while it is unchanged."""
        mark = f"{held.trainer_fence} {held.attempt} {held.phase}" if held is not None else ""
        reply = await self._redis.call("round_of", member, mark)
        if reply == 1:
            return held
        current = _decoded(reply[0], Round)
        if current is None:
            return None
        return msgspec.structs.replace(current, members={} if reply[1] is None else {member: int(reply[1])})

    async def acknowledge(self, member: str, attempt: int, stage: str, detail: str = "") -> bool:
        """Acknowledge a stage of a round. Returns False if the round is over."""
        return bool(await self._redis.call("acknowledge", member, attempt, ordinal(), stage, detail))


def _decoded(raw: bytes | None, type: type[T]) -> T | None:
    """Return the decoded JSON message, or None if it is invalid: foreign bytes must not end a loop."""
    try:
        return None if raw is None else msgspec.json.decode(raw, type=type)
    except msgspec.MsgspecError:
        return None
