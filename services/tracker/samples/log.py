"""Follows a run and writes every group that ends to the sample log.

Guarantees: a group is in the log once for each step and outcome, however often this process is killed: what the log has is in its
files, and Redis keeps groups until they are acknowledged. Training never waits for it: Redis keeps a bounded amount
(functions/prelude.lua) while the lease is renewed, and counts what is missed otherwise.

Waits for: committed steps, groups that were dropped, and the disk. Unblocked by: `POLL_S`; the end of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import structlog

from services.config import RunConfig
from services.operations.inspection.text import TextReader
from services.operations.samples.folder import SAMPLES, LogPosition, LogStatus
from services.protocol.errors import StoreError
from services.runtime.loops import Loop
from services.store import Store
from services.store.calls.samples import is_sampled
from services.store.records import RunState
from services.tracker.metrics import TrackerMetrics
from services.tracker.samples.rows import EndedGroup, Gaps, rows_of
from services.tracker.samples.writer import PartWriter

log = structlog.get_logger()

POLL_S = 1.0  # the longest delay until a group is read
LEASE_S = 300.0  # groups wait this long for a tracker that is gone
BATCH = 64  # groups in a file before merging, some megabytes of tokens
GAPS_S = 2.0  # how long the newest step waits for its logprob gaps, which ranks send while it is committed
GAPS_POLL_S = 0.1
KNOWN = 50_000  # completions whose identity is kept, to skip what Redis lost the acknowledgement of


class SampleLog:
    """The sample log of a run, which `folder` holds."""

    def __init__(self, config: RunConfig, store: Store, folder: Path, stopping: asyncio.Event, metrics: TrackerMetrics) -> None:
        self.done = asyncio.Event()
        self._config, self._store, self._path, self._stopping = config, store, folder / SAMPLES, stopping
        self._metrics, self._reader = metrics, TextReader(config.model.path, download=True)
        self._known: OrderedDict[tuple[str, int, str], None] = OrderedDict()
        self._position, self._missed = LogPosition(), dict[str, int]()
        self._gaps_come = False  # whether this run's trainer sends logprob gaps

    async def follow(self, loop: Loop) -> None:
        """Follow the run until it ends or `stopping` is set, and everything that ended by then is logged."""
        writer = await asyncio.to_thread(PartWriter, self._path, self._config.samples.keep)
        self._position = writer.folder.position
        self._missed = writer.folder.status().missed
        await asyncio.to_thread(self._recognise, writer)
        while True:
            last = self._stopping.is_set()  # read first, so that everything that ended by then is logged
            try:
                more = await self._advance(writer, loop)
            except StoreError:
                if last:
                    break  # Redis stopped first
                raise
            loop.progress()
            if more:
                continue
            if last:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._stopping.wait()
        self.done.set()

    async def _advance(self, writer: PartWriter, loop: Loop) -> bool:
        """Log one batch. Return whether there may be more."""
        state = await self._store.run.state()
        if state is None or state.restoring >= 0:
            return False
        self._attach(writer, state)
        await self._acknowledge(())
        waiting = await self._store.samples.waiting(BATCH)
        groups = [EndedGroup(one.ticket, one.step, one.outcome, one.incarnation, one.header, one.payload) for one in waiting]
        trained, upto, gaps = await self._trained(state, BATCH - len(groups))
        new = [group for group in (*groups, *trained) if group.key not in self._known]
        for first in range(0, len(new), BATCH):
            piece = new[first : first + BATCH]
            payloads = await self._store.samples.payloads([group.payload for group in piece if group.payload])
            started = time.monotonic()
            whole = first + BATCH >= len(new)  # a step is logged when its last group is
            position = upto if whole else self._position.step
            written = await asyncio.to_thread(self._write, writer, piece, payloads, gaps, position)
            self._metrics.sample_write_s.observe(time.monotonic() - started)
            self._metrics.samples.inc(written)
            loop.progress()
        self._position.step = upto
        left = await self._acknowledge([one.entry for one in waiting])
        await self._note_missed(writer)
        if new:
            await asyncio.to_thread(writer.tidy)
        return left > 0 or upto < state.committed_step

    def _attach(self, writer: PartWriter, state: RunState) -> None:
        """Begin where the log is, or after a restore where the run began again."""
        position = self._position
        if position.incarnation != state.incarnation:
            position.incarnation, position.step = state.incarnation, state.retired_step
            position.begun = {**position.begun, str(state.incarnation): state.retired_step + 1}
            if not writer.folder.parts and state.retired_step >= 0:
                log.warning("the sample log does not cover the first steps of the run", step=state.retired_step + 1)
                writer.note(LogStatus(self._missed, state.retired_step + 1))
        position.step = min(max(position.step, state.retired_step), state.committed_step)

    async def _acknowledge(self, entries: Iterable[str]) -> int:
        position, share = self._position, self._config.samples.share
        return await self._store.samples.log(position.incarnation, position.step, share, LEASE_S, list(entries))

    async def _trained(self, state: RunState, room: int) -> tuple[list[EndedGroup], int, dict[int, Gaps]]:
        """Return the groups of the next committed steps, about `room`, the last of those steps, and logprob gaps by step."""
        found, step, gaps = list[EndedGroup](), self._position.step, dict[int, Gaps]()
        while step < state.committed_step and (room > 0 or step == self._position.step):
            step += 1
            plan = await self._store.steps.plan(step)
            if plan is None:
                continue  # retired meanwhile, and counted as missed
            names = [name for name in plan.groups if is_sampled(name, self._config.samples.share)]
            records = await self._store.inspection.group_records(names)
            found += [
                EndedGroup(name, step, "trained", state.incarnation, record.header, record.payload)
                for name, record in records.items()
                if record.header is not None
            ]
            room -= len(names)
            if names:
                gaps[step] = await self._gaps(step, plan.ranks, step == state.committed_step)
        return found, step, gaps

    async def _gaps(self, step: int, ranks: int, newest: bool) -> Gaps:
        """Return the logprob gaps of a step. Those of the newest one may still be on their way."""
        until = time.monotonic() + (GAPS_S if newest and self._gaps_come else 0.0)
        while True:
            found = await self._store.samples.gaps(step, ranks)
            if None not in found or time.monotonic() >= until:
                break
            await asyncio.sleep(GAPS_POLL_S)
        self._gaps_come |= any(part is not None for part in found)
        return {segment: gaps for part in found if part is not None for segment, gaps in part.items()}

    def _write(
        self, writer: PartWriter, groups: list[EndedGroup], payloads: dict[str, Any], gaps: dict[int, Gaps], upto: int
    ) -> int:
        now_s, kind = time.time(), self._config.advantage.kind
        rows = [
            row
            for group in groups
            for row in rows_of(
                group, payloads.get(group.payload), self._reader, kind, now_s,
                gaps.get(group.step) if group.outcome == "trained" else None,
            )
        ]  # fmt: skip
        position = LogPosition(self._position.incarnation, upto, self._position.begun)
        writer.write(rows, position)
        self._remember(group.key for group in groups)
        return len(rows)

    def _remember(self, keys: Iterable[tuple[str, int, str]]) -> None:
        self._known.update(dict.fromkeys(keys))
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)

    def _recognise(self, writer: PartWriter) -> None:
        """Read the identities of what was logged last."""
        rows, tables = 0, list[Any]()
        for part in reversed(writer.folder.parts):
            if rows > KNOWN:
                break
            tables.append(pq.read_table(part.path, columns=["payload", "step", "outcome"]))
            rows += part.rows
        for table in reversed(tables):
            columns = (table[name].to_pylist() for name in ("payload", "step", "outcome"))
            self._remember(zip(*columns, strict=True))

    async def _note_missed(self, writer: PartWriter) -> None:
        missed = await self._store.samples.missed()
        if missed != self._missed:
            more = sum(missed.values()) - sum(self._missed.values())
            log.warning(
                "groups are missing from the sample log: the tracker was behind or not running", groups=more, missed=missed
            )
            self._missed = missed
            status = writer.folder.status()
            await asyncio.to_thread(writer.note, LogStatus(missed, status.first_step))
        self._metrics.missed_groups.set(sum(missed.values()))
