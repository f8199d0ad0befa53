"""Follows a run and writes every group that ends to the sample log.

Guarantees: a group is in the log once for each step and outcome, however often this process is killed: its files say what the log
has, and Redis keeps groups until they are acknowledged. Training never waits for it: Redis keeps a bounded amount
(functions/prelude.lua) while the lease is renewed, and counts what is missed otherwise.

Waits for: committed steps, groups that were dropped, and the disk. Unblocked by: `POLL_S`; the end of the run.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import structlog

from services.config import RunConfig
from services.operations.inspection.text import TextReader
from services.operations.samples.folder import SAMPLES, LogPosition, LogStatus
from services.protocol.errors import StoreError
from services.protocol.payloads import Payload
from services.runtime.loops import Loop, is_set_within
from services.store import Store
from services.store.records import RunState
from services.tracker.ended import EndedGroups, pieces
from services.tracker.metrics import TrackerMetrics
from services.tracker.rows import EndedGroup, Gaps, GroupKey, LoggedRows
from services.tracker.writer import PartWriter

log = structlog.get_logger()

LEASE_S = 300.0  # groups wait this long for a tracker that is gone
IDENTITY = ("payload", "step", "outcome", "incarnation")  # columns of a `GroupKey`
KNOWN = 50_000  # groups whose identity is kept, to skip those whose acknowledgement Redis lost
POLL_S = 1.0  # how often ended groups are counted, and the shortest time between two files
LONGEST_S = 10.0
SHARE = 0.004  # of a core, to be spent on writing; reading takes about half as much
WAITING_BYTES = 8 << 20  # of tokens that may accumulate meanwhile
WAITING_STEPS = 8  # Redis holds 16 behind a checkpoint (`HELD_STEPS` in functions/steps.lua)
WAITING_GROUPS = 512  # that were dropped: Redis keeps 2,048 (`SAMPLES_KEPT` in functions/prelude.lua)


class SampleLog:
    """The sample log of a run, which `folder` holds."""

    def __init__(self, config: RunConfig, store: Store, folder: Path, stopping: asyncio.Event, metrics: TrackerMetrics) -> None:
        self.done = asyncio.Event()
        self._config, self._store, self._path, self._stopping = config, store, folder / SAMPLES, stopping
        self._metrics, self._reader = metrics, TextReader(config.model.path, download=True)
        self._known: OrderedDict[GroupKey, None] = OrderedDict()
        self._position = LogPosition()
        self._missed, self._counted = dict[str, int](), dict[str, int]()  # recorded in the log; counted by this Redis
        self._ended, self._pace = EndedGroups(store, config.samples.share), Pace()

    async def follow(self, loop: Loop) -> None:
        """Follow the run until it ends or `stopping` is set, and everything that ended by then is logged."""
        writer = await asyncio.to_thread(PartWriter, self._path, self._config.samples.keep)
        await asyncio.to_thread(self._recognise, writer)  # first: it leaves damaged files out
        self._position = writer.folder.position
        status = writer.folder.status()
        self._missed = dict(status.missed)
        self._counted = dict(status.missed if status.counted is None else status.counted)
        while True:
            last = self._stopping.is_set()  # read first, so that everything that ended by then is logged
            try:
                more = await self._advance(writer, loop, last)
            except StoreError:
                if last:
                    break  # Redis stopped first
                raise
            loop.progress()
            if more:
                continue
            if last:
                break
            await is_set_within(self._stopping, POLL_S)
        self.done.set()

    async def _advance(self, writer: PartWriter, loop: Loop, last: bool) -> bool:
        """Log one batch, if it is time or the `last` one. Return whether there is more."""
        state = await self._store.run.state()
        if state is None or state.restoring >= 0:
            return False
        await self._attach(writer, state)
        dropped = await self._acknowledge(())
        if not last and not self._pace.due(state.committed_step - self._position.step, dropped):
            return False
        found = await self._ended.after(self._position.step, state)
        new = [group for group in found.groups if group.key not in self._known]
        cpu_s = 0.0
        for piece in pieces(new):
            payloads = await self._store.samples.payloads([group.payload for group in piece if group.payload])
            started = time.monotonic()
            whole = piece[-1] is new[-1]  # a step is logged when its last group is
            position = found.step if whole else self._position.step
            cpu_s += await asyncio.to_thread(self._write, writer, piece, payloads, found.gaps, position)
            self._metrics.sample_write_s.observe(time.monotonic() - started)
            loop.progress()
        self._position.step = found.step
        await self._acknowledge(found.entries)
        await self._note_missed(writer)
        if new:
            self._pace.wrote(cpu_s, sum(group.payload_bytes for group in new))
        return found.more

    async def _attach(self, writer: PartWriter, state: RunState) -> None:
        """Begin where the log ends, or after a restore with the first step that still exists. That may be later than the step
        where the run resumed, and this log may not have seen some restores.
        """
        position = self._position
        if position.incarnation != state.incarnation:
            begun = {life: step for life, step in (await self._store.samples.begun()).items() if life > position.incarnation}
            begun.setdefault(state.incarnation, state.retired_step + 1)
            position.incarnation, position.step = state.incarnation, state.retired_step
            position.begun = {**position.begun, **{str(life): step for life, step in begun.items()}}
            if not writer.folder.parts and state.retired_step >= 0:
                log.warning("the sample log does not cover the first steps of the run", step=state.retired_step + 1)
                writer.note(LogStatus(self._missed, state.retired_step + 1, self._counted))
        position.step = min(max(position.step, state.retired_step), state.committed_step)

    async def _acknowledge(self, entries: Iterable[str]) -> int:
        position, share = self._position, self._config.samples.share
        return await self._store.samples.log(position.incarnation, position.step, share, LEASE_S, list(entries))

    def _write(
        self, writer: PartWriter, groups: list[EndedGroup], payloads: dict[str, Payload], gaps: dict[int, Gaps], upto: int
    ) -> float:
        """Write a file. Return the processor seconds that it took."""
        began_s = time.thread_time()
        rows = LoggedRows(self._reader, self._config.advantage.kind, time.time())
        for group in groups:
            rows.add(group, payloads.get(group.payload), gaps.get(group.step) if group.outcome == "trained" else None)
        now, share = self._position, self._config.samples.share
        writer.write(rows.columns(), LogPosition(now.incarnation, upto, now.begun, share=share))
        self._remember(group.key for group in groups)
        self._metrics.samples.inc(len(rows))
        writer.tidy()
        return time.thread_time() - began_s

    def _remember(self, keys: Iterable[GroupKey]) -> None:
        self._known.update(dict.fromkeys(keys))
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)

    def _recognise(self, writer: PartWriter) -> None:
        """Read the identities of what was logged last."""
        groups, found = 0, list[dict[GroupKey, None]]()
        for part in reversed(writer.folder.parts):
            if groups > KNOWN:
                break
            if (table := writer.read(part, IDENTITY)) is None:
                continue
            columns = (table[name].to_pylist() for name in IDENTITY)
            found.append(dict.fromkeys(zip(*columns, strict=True)))
            groups += len(found[-1])
        for keys in reversed(found):
            self._remember(keys)

    async def _note_missed(self, writer: PartWriter) -> None:
        """Record what Redis reports as missed. Earlier records stay, even if Redis was lost and counts from 0 again."""
        missed = await self._store.samples.missed()
        if missed != self._counted:
            if any(missed.get(outcome, 0) < count for outcome, count in self._counted.items()):
                self._counted = {}
            more = {outcome: count - self._counted.get(outcome, 0) for outcome, count in missed.items()}
            self._counted = missed
            if any(more.values()):
                log.warning(
                    "groups are missing from the sample log: the tracker was behind, also when a restore came, or not running",
                    groups=sum(more.values()),
                    missed=more,
                )
                for outcome, count in more.items():
                    self._missed[outcome] = self._missed.get(outcome, 0) + count
            status = LogStatus(self._missed, writer.folder.status().first_step, missed)
            await asyncio.to_thread(writer.note, status)
        self._metrics.missed_groups.set(sum(self._missed.values()))


class Pace:
    """Decides when the next file is due, by the time that the last one took and by what waits.

    Large files cost less of a core than many small ones.
    """

    def __init__(self) -> None:
        self._wrote_s, self._wait_s = time.monotonic(), 0.0

    def due(self, steps: int, groups: int) -> bool:
        """Return whether to write, given the numbers of committed steps and dropped groups that wait."""
        return time.monotonic() >= self._wrote_s + self._wait_s or steps >= WAITING_STEPS or groups >= WAITING_GROUPS

    def wrote(self, cpu_s: float, size_bytes: int) -> None:
        """Note a file of `size_bytes` of tokens, which accumulated since the previous one."""
        now_s = time.monotonic()
        took_s, self._wrote_s = now_s - self._wrote_s, now_s
        longest_s = min(LONGEST_S, took_s * WAITING_BYTES / max(1, size_bytes))
        self._wait_s = max(POLL_S, min(longest_s, cpu_s / SHARE))
