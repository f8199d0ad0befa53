"""Kills in a storm, and the counts after it.

`lost`, `doubled`: tickets, by the audit. `tools_twice`: tool calls that ran twice. `resampled_turns`: turns sampled again after
their tool had been called, and so after they were committed. `leaked`: processes, scratch folders that no pod sweeps, turns of
tickets that have ended, and tickets that nobody holds.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from services.confined import scratch
from services.operations.inspection.ledger import assess
from tests.storm.world import POLL_S, Pod, World, world

PAUSES_S = {"environment": 2.5, "generator": 3.0, "dataprep": 12.0}
"""Maximum seconds from a pod's readiness to its kill. A new leader waits for the lease of the previous one."""
END_LIMIT_S = 60.0


@dataclass
class Storm:
    """Results of a storm."""

    kills: Counter[str] = field(default_factory=Counter[str])
    turns: int = 0
    groups: int = 0
    lost: int = 0
    doubled: int = 0
    tools_twice: int = 0
    resampled_turns: int = 0
    leaked: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list[str])

    @property
    def harm(self) -> dict[str, int]:
        """Counts that must be 0."""
        return {name: getattr(self, name) for name in ("lost", "doubled", "tools_twice", "resampled_turns", "leaked")}


async def storm(
    folder: Path,
    kills: int,
    seed: int = 0,
    environments: int = 2,
    generators: int = 2,
    of_each: Mapping[str, int] | None = None,
) -> Storm:
    """Kill at least this many pods of a run, singly and several at a time; let the run settle, and count.

    `of_each`: the minimum number of each kind.
    """
    found, began = Storm(), time.monotonic()

    def enough() -> bool:
        return found.kills.total() >= kills and all(found.kills[kind] >= least for kind, least in (of_each or {}).items())

    async with world(folder, environments, generators) as place:
        await asyncio.gather(*(_kill_again_and_again(place, pod, enough, seed, found) for pod in place.pods))
        await _progress(place)  # interrupted work is resumed
        await _ended(place)
        await _counted(place, found)
    found.seconds = time.monotonic() - began
    return found


async def _kill_again_and_again(place: World, pod: Pod, enough: Callable[[], bool], seed: int, found: Storm) -> None:
    dice = random.Random(f"{seed} {pod.name}")
    while not enough():
        await asyncio.sleep(dice.uniform(0.0, PAUSES_S[pod.kind]))
        if enough():
            return
        place.end(pod, signal.SIGKILL)
        found.kills[pod.kind] += 1
        assert pod.process is not None
        await asyncio.to_thread(pod.process.wait)
        place.start(pod)
        await place.ready(pod)


async def _progress(place: World, steps: int = 2) -> None:
    """Wait until this many more steps are trained."""
    state = await place.store.run.state()
    assert state is not None
    target, deadline = state.committed_step + steps, time.monotonic() + 120
    while (state := await place.store.run.state()) is None or state.committed_step < target:
        assert time.monotonic() < deadline, f"no progress after the storm: step {state and state.committed_step}, not {target}"
        await asyncio.sleep(POLL_S)


async def _ended(place: World) -> None:
    """Terminate environments, then the other pods, and wait for them."""
    for kind in ("environment", "generator", "dataprep"):
        pods = [pod for pod in place.pods if pod.kind == kind]
        for pod in pods:
            place.end(pod, signal.SIGTERM)
        for pod in pods:
            assert pod.process is not None
            await asyncio.to_thread(pod.process.wait, END_LIMIT_S)


async def _counted(place: World, found: Storm) -> None:
    store, keys = place.store, place.store.keys
    report = assess(place.config.run.name, await store.run.audit())
    found.lost, found.doubled, found.groups = report.lost, report.doubled, report.issued
    found.faults += report.messages
    await asyncio.to_thread(_read_notes, place.log, found)
    left = await asyncio.to_thread(_left, place)
    outstanding = {name.decode() for name in await store.client.zrange(keys.outstanding, 0, -1)}
    async for key in store.client.scan_iter(keys.turns("*")):
        if key.decode().removeprefix(keys.turns("")) not in outstanding:
            left.append(key.decode())
    held = await store.client.hgetall(keys.prefix + ":claims")  # pyright: ignore[reportGeneralTypeIssues]
    left += [f"claim {entry.decode()} of {holder.decode()}" for entry, holder in held.items()]
    found.leaked = len(left)
    found.faults += left


def _read_notes(log: Path, found: Storm) -> None:
    called: dict[str, int] = {}  # turn -> time of its tool call
    for line in sorted(log.read_text().splitlines(), key=lambda line: int(line.split()[2])):
        what, turn, at = line.split()
        if what == "tool":
            found.tools_twice += turn in called
            called.setdefault(turn, int(at))
        found.turns += what != "sampled"
        found.resampled_turns += what == "sampled" and turn in called


def _left(place: World) -> list[str]:
    """Return the processes, and the scratch folders that remain after a pod's sweep a minute later."""
    deadline = time.monotonic() + END_LIMIT_S
    while (processes := place.processes()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    folders = place.folder / "scratch"
    with patch.object(scratch, "YOUNG_S", 0.0), patch.object(scratch.tempfile, "gettempdir", lambda: str(folders)):
        scratch.sweep()
    return [f"process {pid}" for pid in processes] + [str(path) for path in folders.iterdir()]
