"""Marks each generator's pod with what its removal would cost, so that a Deployment that shrinks removes the idle ones first.

A removed pod drains: another pod continues what it cannot finish in time, and recomputes the prompt and the tokens so far. So the
cost is the share of its KV cache that is in use, which is the tokens in flight, and the completions that wait.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable

import structlog

from services.protocol.messages import PodStatus
from services.runtime.cluster.account import ClusterError
from services.scaler.workload import KubernetesApi, Missing

log = structlog.get_logger()

EVERY_S = 30.0
"""Marks are coarse and rare, since each one is a write to the cluster's database."""
AT_ONCE = 20
TURN_S = 5.0
"""How long one turn begins new marks: the scaler has other work, and a liveness limit. The next turn makes the others."""


def cost(gauges: dict[str, float]) -> int:
    """Return the deletion cost of a generator with this load: thousandths of its KV cache, and completions."""
    return round(1000 * gauges.get("kv_usage", 0.0) + gauges.get("running", 0.0) + gauges.get("waiting", 0.0))


class DeletionCosts:
    """Keeps the marks of a fleet's pods near their load."""

    def __init__(self, cluster: KubernetesApi) -> None:
        self._cluster, self._marked = cluster, dict[str, int]()
        self._elsewhere = set[str]()  # members whose pods are on another cluster of the run
        self.due = 0.0  # monotonic time of the next marks

    async def follow(self, pods: Iterable[PodStatus]) -> None:
        """Mark the generators whose cost has doubled or halved, at most every `EVERY_S`; missing pods are left out.

        In random order, so that pods that cannot be marked do not keep the others from being marked.
        """
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + EVERY_S
        now = {pod.member: (pod.name, cost(pod.gauges)) for pod in pods if pod.kind == "generator"}
        self._elsewhere &= now.keys()
        self._marked = {member: worth for member, worth in self._marked.items() if member in now}
        changed = [member for member, (_, worth) in now.items() if self._changed(member, worth)]
        gate, end = asyncio.Semaphore(AT_ONCE), time.monotonic() + TURN_S

        async def mark(member: str) -> None:
            async with gate:
                if time.monotonic() < end:
                    await self._mark(member, *now[member])
                else:
                    self.due = 0.0

        await asyncio.gather(*map(mark, random.sample(changed, len(changed))))

    def _changed(self, member: str, worth: int) -> bool:
        if member in self._elsewhere:
            return False
        return member not in self._marked or self._marked[member].bit_length() != worth.bit_length()

    async def _mark(self, member: str, name: str, worth: int) -> None:
        try:
            await self._cluster.mark(name, worth)
        except Missing:
            self._elsewhere.add(member)
        except ClusterError as error:
            log.warning("pod not marked with its deletion cost", pod=name, error=str(error))
        else:
            self._marked[member] = worth
