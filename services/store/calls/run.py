"""The run's state, desired state and leadership (functions/control.lua)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from services.protocol.messages import PROTOCOL_VERSION
from services.store.calls.facet import Facet
from services.store.records import PauseMode, RunState, TableRules, read_state


class Runs(Facet):
    """The run as a whole."""

    async def create(
        self, config: str, dataset: str, steps: int, slots: int, table: TableRules | None = None, payload_shards: int = 0
    ) -> bool:
        """Create the run, or attach to the same one (False). Raises `DifferentRun` when the name is taken, `StoreError` when its
        payloads cannot lie in so many shards."""
        spread = (payload_shards,) if payload_shards else ()
        if spread and await self.state() is None:  # whoever attaches can do without a shard for a while
            await self._payloads.check_shards(payload_shards)
        rules = astuple(table or TableRules())
        created = bool(await self._redis.call("create", PROTOCOL_VERSION, config, dataset, steps, slots, *rules, *spread))
        await self._payloads.spread(payload_shards)
        return created

    async def state(self) -> RunState | None:
        """The run's state, or None when it was not created yet."""
        state = read_state(self._keys.name, await self._redis.ask(self._redis.commands.hgetall(self._keys.run)))
        if state is not None:
            await self._payloads.spread(state.payload_shards)
        return state

    async def pause(self, role: str, why: str, mode: PauseMode = "keep") -> None:
        """Desire that `generator`, `dataprep` or `trainer` pods pause, until resumed. `why` says who wants it, too."""
        await self._redis.call("desire", f"paused:{role}", f"{mode} {why}")

    async def resume(self, role: str) -> None:
        """Desire that pods of the role go on."""
        await self._redis.call("desire", f"paused:{role}", "")

    async def request_restore(self, step: int | None) -> None:
        """Desire that the run, ended or not, goes back to the checkpoint of `step`: its trainer starts anew and does it.

        None: desire it no more.
        """
        await self._redis.call("desire", "restore", "" if step is None else str(step))  # first: from here on the run does not end
        if step is not None:
            await self._redis.call("desire", "stopping", "")
            await self._redis.call("desire", "finished", "")

    async def resumed(self, how: str) -> None:
        """What a trainer did to take the run up, and why; empty: forget what one did before."""
        await self._redis.call("desire", "resumed", how)

    async def scale_generators(self, replicas: int, why: str) -> None:
        """Desire that the run has so many generators, from now on and after an interruption."""
        await self._redis.call("desire", "scale:generator", f"{replicas} {why}")

    async def bound_generators(self, most: int | None) -> None:
        """How many generators there is room for where they are started; None: no bound."""
        await self._redis.call("desire", "most:generator", "" if most is None else str(most))

    async def followed_generators(self, replicas: int) -> None:
        """A cluster's scaler: the wish and the Deployment agree on so many."""
        await self._redis.call("desire", "followed:generator", str(replicas))

    async def request_checkpoint(self, why: str) -> None:
        """Desire a checkpoint of what is committed now, or of a later step; the trainer's `checkpointed` ends the wish."""
        await self._redis.call("desire", "checkpoint", f"{secrets.token_hex(4)} {why}")

    async def checkpoint_failed(self, why: str, fence: int | None = None) -> None:
        """A checkpoint could not be written; the next that can clears this. A trainer gives its `fence`."""
        await self._redis.call("desire", "checkpoint_failed", why, *_given(fence))

    async def stop(self, why: str) -> None:
        """Desire that the run ends early: the trainer finishes its step, saves and calls `finish`."""
        await self._redis.call("desire", "stopping", why)

    async def finish(self, how: str, fence: int | None = None) -> None:
        """The run has ended; every service exits. A trainer gives its `fence`. Raises `OutOfOrder` when the run is to go back."""
        await self._redis.call("desire", "finished", how, *_given(fence))

    async def memory(self, limit: int = 0) -> tuple[int, int]:
        """Bytes that the server uses, and may use: `limit`, or else its own; 0: there is no limit. Of several the fullest."""
        return fullest(await self._payloads.info_of_all("memory"), limit)

    async def audit(self) -> dict[str, int]:
        """Counts of every place a ticket can be in, and of every outcome, in one instant (functions/control.lua)."""
        reply = await self._redis.call("audit")
        return {reply[i].decode(): int(reply[i + 1]) for i in range(0, len(reply), 2)}

    async def lead(self, candidate: str, lease_s: float) -> int | None:
        """Take or renew the leadership of dataprep; the fencing number, or None when another leads."""
        return int(await self._redis.call("lead", candidate, int(lease_s * 1000))) or None

    async def step_down(self, candidate: str) -> None:
        """Give the leadership up at once."""
        await self._redis.call("step_down", candidate)

    async def attach_trainer(self) -> int:
        """The trainer's fencing number: older trainers are refused from now on."""
        return int(await self._redis.call("attach_trainer"))


def fullest(said: Sequence[Mapping[str, str]], limit: int) -> tuple[int, int]:
    """Of servers, by what they say of themselves, the one of whose memory the largest share is used, or the most where there is
    no limit: bytes used, and those that may be: `limit`, or else its own."""
    memory = [(int(info["used_memory"]), limit or int(info.get("maxmemory", 0))) for info in said]
    return max(memory, key=lambda one: (one[0] / (one[1] or math.inf), one[0]))


def _given(fence: int | None) -> tuple[int, ...]:
    return () if fence is None else (fence,)
