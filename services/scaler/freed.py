"""Remembers which objects the scaler has emptied because a run had finished, in a ConfigMap of the release.

Guarantees: an object is emptied once per finished run. Its mark also holds for the next run of the release, and is void once
the object is recreated, since it contains the object's uid.
"""

from __future__ import annotations

from services.scaler.workload import KubernetesApi, Replicas, Workload

EMPTYING, EMPTIED = "emptying", "emptied"
"""Stages of a mark: a scaler that was interrupted sets an object to zero again, unless it had done so."""


class Freed:
    """The marks, as last read."""

    def __init__(self, cluster: KubernetesApi, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._marks = dict[str, str]()

    async def refresh(self) -> None:
        """Read the marks."""
        self._marks = await self._cluster.notes(self._name)

    def holds(self, workload: Workload, seen: Replicas, *stages: str) -> bool:
        """Return whether this very object has a mark of one of the stages; by default, of any."""
        return self._marks.get(workload.name) in [f"{stage} {seen.uid}" for stage in stages or (EMPTYING, EMPTIED)]

    async def mark(self, workload: Workload, seen: Replicas, stage: str) -> None:
        """Mark the object."""
        await self._note(workload, f"{stage} {seen.uid}")

    async def clear(self, workload: Workload) -> None:
        """Remove its mark, if it has one."""
        if workload.name in self._marks:
            await self._note(workload, None)

    async def _note(self, workload: Workload, mark: str | None) -> None:
        await self._cluster.note(self._name, workload.name, mark)
        self._marks = {name: each for name, each in {**self._marks, workload.name: mark}.items() if each is not None}
