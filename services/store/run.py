"""The run's state, desired state and leadership (functions/control.lua)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from msgspec.structs import astuple

from services.protocol.messages import PROTOCOL_VERSION
from services.store.facet import Facet, named, token
from services.store.records import FAILING, RunState, TableRules, read_state


class Runs(Facet):
    """The run as a whole."""

    async def create(
        self, config: str, dataset: str, steps: int, slots: int, table: TableRules | None = None, defining: bytes = b""
    ) -> bool:
        """Create the run, or attach to the same one (returns False). `defining`: the keys that `config` is the digest of.

        Raises `DifferentRun` if another run has the name, `StoreError` if a master of a Cluster cannot store its payloads.
        """
        if self._payloads.shards and await self.state() is None:  # a process that attaches can do without a shard for a while
            await self._payloads.check()
        identity, rules = (PROTOCOL_VERSION, config, dataset, steps, slots), astuple(table or TableRules())
        return bool(await self._redis.call("create", *identity, *rules, defining))

    async def defining(self) -> bytes:
        """Return the keys that define the run, as it was created with them; empty: an older version created it."""
        (kept,) = await self._redis.send(("GET", self._keys.defining))
        return kept or b""

    async def set_steps(self, steps: int) -> bool:
        """Give a run that is resumed another number of steps; one that had finished continues if it has steps left.

        Return whether the number changed.
        """
        return bool(await self._redis.call("set_steps", token(), steps))

    async def state(self) -> RunState | None:
        """Return the run's state, or None if it was not created yet."""
        return read_state(self._keys.name, await self._redis.ask(self._redis.client.hgetall(self._keys.run)))

    async def pause(self, role: str, why: str) -> None:
        """Request that `generator`, `dataprep` or `trainer` pods pause until resumed. `why` also names the requester."""
        await self._desire(f"paused:{role}", _paused(why))

    async def resume(self, role: str, why: str = "") -> None:
        """Request that pods of the role resume. `why` also names the requester (`RunState.last_resume`)."""
        await self._desire("last_resume", f"{time.time():.0f} {why}" if why else "")  # first: who sees it resumed sees why
        await self._desire(f"paused:{role}", "")

    async def pause_failing(self, why: str, letter: str) -> None:
        """Request that dataprep pauses until resumed, because one prompt after another fails (`RunState.failing`); `letter` is
        the dead letter of the last one.
        """
        await self._redis.call("pause_failing", token(), _paused(FAILING + why), letter)

    async def failed(self) -> int:
        """Return how many tickets of the whole run have failed for good and are not requeued."""
        (count,) = await self._redis.send(("HGET", self._keys.ledger, "failed"))
        return int(count or 0)

    async def request_restore(self, step: int, why: str = "") -> None:
        """Request that the run, ended or not, is restored to the checkpoint of `step`: its trainer restarts and does it.

        `why` also names the requester.
        """
        await self._desire("restore_why", f"{step} {why}")
        await self._desire("restore", str(step))  # from here on the run does not end

    async def restore_failed(self, step: int, why: str, fence: int) -> None:
        """Record that the run cannot be restored to the checkpoint of `step`, and withdraw that request, but not a later one.

        A run that had ended before the request is ended again.
        """
        await self._desire("restore_failed", f"{step} {why}", fence)

    async def resumed(self, how: str) -> None:
        """Record how and why a trainer resumed the run; an empty string clears the record."""
        await self._desire("resumed", how)

    async def scale_generators(self, replicas: int, why: str) -> None:
        """Request a number of generators for the run, which also holds after an interruption."""
        await self._desire("scale:generator", f"{replicas} {why}")

    async def bound_generators(self, limit: int | None) -> None:
        """Set how many generators fit on the machine that starts them; None: no bound."""
        await self._desire("most:generator", "" if limit is None else str(limit))

    async def followed_generators(self, replicas: int) -> None:
        """Record, from a cluster's scaler, the replicas on which the request and the Deployment agree."""
        await self._desire("followed:generator", str(replicas))

    async def followed_object(self, object: str) -> None:
        """Record, from a cluster's scaler, which Deployment it follows (`Scale.object`); an empty string clears the record."""
        await self._desire("object:generator", object)

    async def request_checkpoint(self, why: str) -> None:
        """Request a checkpoint of the current committed step or a later one; the trainer's `checkpointed` clears the request."""
        await self._desire("checkpoint", f"{token()} {why}")

    async def checkpoint_failed(self, why: str, fence: int | None = None) -> None:
        """Record that a checkpoint could not be written; the next successful one clears this. A trainer gives its `fence`."""
        await self._desire("checkpoint_failed", why, fence)

    async def stop(self, why: str) -> None:
        """Request that the run ends early: the trainer finishes its step, saves and calls `finish`."""
        await self._desire("stopping", why)

    async def finish(self, how: str, fence: int | None = None) -> None:
        """End the run; every service exits. A trainer gives its `fence`. Raises `OutOfOrder` if a restore was requested."""
        await self._desire("finished", how, fence)

    async def memory(self) -> tuple[int, int]:
        """Return the bytes that the server uses, and its maxmemory; 0: no limit. Of several servers, the fullest."""
        return fullest(await self._payloads.info_of_all("memory"))

    async def audit(self) -> dict[str, int]:
        """Count every place a ticket can be in, and every outcome, at the same instant (functions/control.lua)."""
        return {name: int(count) for name, count in named(await self._redis.call("audit")).items()}

    async def lead(self, candidate: str, lease_s: float) -> int | None:
        """Take or renew the leadership of dataprep. Returns the fencing number, or None if another pod leads."""
        return int(await self._redis.call("lead", candidate, int(lease_s * 1000))) or None

    async def step_down(self, candidate: str) -> None:
        """Give up the leadership at once."""
        await self._redis.call("step_down", candidate)

    async def attach_trainer(self) -> int:
        """Return a new fencing number for the trainer; older trainers are rejected from now on."""
        return int(await self._redis.call("attach_trainer", token()))

    async def _desire(self, field: str, value: str, fence: int | None = None) -> None:
        """Set a field of the run's desired state, or clear it with an empty value."""
        await self._redis.call("desire", token(), field, value, *(() if fence is None else (fence,)))


def _paused(why: str) -> str:
    return f"{time.time():.0f} {why}"


def fullest(said: Sequence[Mapping[str, str]]) -> tuple[int, int]:
    """Return bytes used and maxmemory of the fullest server, from their INFO. The fullest is the one with the largest share of
    its memory in use, or without limits the one that uses most.
    """
    memory = [(int(info["used_memory"]), int(info.get("maxmemory", 0))) for info in said]
    return max(memory, key=lambda one: (one[0] / (one[1] or math.inf), one[0]))
