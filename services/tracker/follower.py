"""Brings the records of a run to one tracker.

Guarantees: every recorded step and evaluation round reaches the tracker, in order, however often the tracker or this process
dies. What a crash may have cut off is written again, so a step may appear twice, with the same values. A failing tracker is
logged once and retried; only this follower waits for it.

Waits for: the Redis streams `metrics` and `evaluations`, which keep what the tracker does not have yet; the tracker.
Unblocked by: `POLL_S`; the end of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from services.config import RunConfig
from services.operations.aliases import aliases
from services.protocol.errors import StoreError
from services.runtime.loops import Loop
from services.store import Store
from services.tracker.metrics import TrackerMetrics
from services.tracker.tracker import Record, Tracker
from services.tracker.trackers import open_tracker

log = structlog.get_logger()

POLL_S = 1.0  # the longest delay until a step reaches its tracker
RETRY_S = 10.0  # seconds until a failed tracker is retried
BACKLOG_S = 2.0  # seconds between reads of the last recorded step
BATCH = 1000  # records at a time, some hundred KB


class Position(msgspec.Struct):
    """What a tracker has stored durably, in a file next to its own: the last step and the last evaluated version. -1: none."""

    identity: str  # of the run, for trackers that identify runs
    step: int = -1
    evaluated: int = -1
    step_incarnation: int = 0  # of the run, at that step; after a restore to a checkpoint, steps are recorded again
    evaluated_incarnation: int = 0


class Follower:
    """Follows a run for the tracker `name`, which writes under `folder`."""

    def __init__(
        self, name: str, config: RunConfig, store: Store, folder: Path, stopping: asyncio.Event, metrics: TrackerMetrics
    ) -> None:
        self.name, self.done, self.metrics = name, asyncio.Event(), metrics
        self.taken = -1
        """The last step written to the tracker."""
        self._taken_life = 0  # its incarnation
        self._config, self._store, self._folder, self._stopping = config, store, folder, stopping
        self._tracker: Tracker | None = None
        self._reached: Position | None = None  # what the tracker has, durably or not; None: unknown
        self._failing = False

    def taken_of(self, incarnation: int, restores: Mapping[int, int]) -> int:
        """Return the last step of this incarnation of the run that was written, or that it began after.

        `restores`: first step of each incarnation that a restore began.
        """
        later = [first for begun, first in restores.items() if self._taken_life < begun <= incarnation]
        return min([self.taken, *(first - 1 for first in later)])

    async def follow(self, loop: Loop) -> None:
        """Follow the run until it ends or `stopping` is set, and everything recorded by then was tried once more."""
        position = self._reached = self._reached or self._position()  # after a failure of Redis the tracker is still open
        steps_after, rounds_after, written = "-", "-", False
        self.taken, self._taken_life = position.step, position.step_incarnation
        while True:
            last = self._stopping.is_set()  # read before polling, so that everything recorded by then is written
            try:
                steps = await self._store.monitor.metrics(steps_after, BATCH)
                rounds = await self._store.evaluation.records(rounds_after, BATCH)
            except StoreError:
                if last:
                    break  # Redis stopped first
                raise
            written = await self._write(position, [record for _, record in steps], [record for _, record in rounds])
            loop.progress()
            if not written:  # read again what the tracker received but does not have durably
                self._reached = None  # also if the file cannot be read now, which restarts the loop
                position = self._reached = self._position()
                steps_after, rounds_after = "-", "-"
            else:
                steps_after = steps[-1][0] if steps else steps_after
                rounds_after = rounds[-1][0] if rounds else rounds_after
                if max(len(steps), len(rounds)) == BATCH:
                    continue
            if last:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if written else RETRY_S):
                    await self._stopping.wait()
        if not written:
            log.warning("records left in Redis, to be written on resume", tracker=self.name, written_to_step=position.step)
        await self._close(position)
        self.done.set()

    async def _write(self, position: Position, steps: list[Record], rounds: list[Record]) -> bool:
        """Write what is new and advance `position`. Return False if the tracker failed."""
        steps = _after(position.step, position.step_incarnation, "step", steps)
        rounds = _after(position.evaluated, position.evaluated_incarnation, "eval/version", rounds)
        if not steps and not rounds:
            return True
        started = time.monotonic()
        try:
            await asyncio.to_thread(self._hand_over, position.identity, steps, rounds)
        except Exception as error:  # a tracker's package may raise anything; no record may be lost by it
            if not self._failing:
                log.warning("tracker failed, retrying", tracker=self.name, every_s=RETRY_S, error=str(error), exc_info=True)
            self._failing = True
            self.metrics.failures[self.name].inc()
            await self._close(position)
            return False
        if self._failing:
            log.info("tracker works again", tracker=self.name)
        self._failing = False
        self.metrics.write_s[self.name].observe(time.monotonic() - started)
        self.metrics.written[self.name].inc(len(steps) + len(rounds))
        if steps:
            position.step, position.step_incarnation = int(steps[-1]["step"]), _incarnation(steps[-1])
        if rounds:
            position.evaluated, position.evaluated_incarnation = int(rounds[-1]["eval/version"]), _incarnation(rounds[-1])
        self.taken, self._taken_life = position.step, position.step_incarnation
        if self._tracker is not None and self._tracker.durable:
            self._save(position)
        return True

    def _hand_over(self, identity: str, steps: list[Record], rounds: list[Record]) -> None:
        if self._tracker is None:
            self._tracker = open_tracker(self.name, self._config, self._folder, identity)
        self._tracker.write([{**step, **aliases(step)} for step in steps], rounds)

    async def _close(self, position: Position) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            try:
                await asyncio.to_thread(tracker.close)
                self._save(position)
            except Exception as error:  # as above; it may already be broken
                log.warning("tracker could not be closed", tracker=self.name, error=str(error))

    @property
    def _path(self) -> Path:
        return self._folder / f"{self.name}.json"

    def _position(self) -> Position:
        """Return the position in the file; without a readable file, that of a tracker that has nothing."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Position)
        except FileNotFoundError:
            pass
        except msgspec.MsgspecError as error:  # the machine lost power while it was written
            log.warning(
                "writing all records again, since the file with the tracker's position is damaged",
                file=str(self._path),
                error=str(error),
            )
        self._save(found := Position(secrets.token_hex(4)))
        return found

    def _save(self, position: Position) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(position))
        fresh.replace(self._path)


async def show_backlog(store: Store, followers: Sequence[Follower], metrics: TrackerMetrics, loop: Loop) -> None:
    """Export how far the trackers are behind, including any that hang."""
    while True:
        last, restores = await store.monitor.last_record(), await store.samples.begun()
        for follower in followers:
            taken = follower.taken_of(_incarnation(last), restores)
            metrics.backlog[follower.name].set(max(0, int(last.get("step", -1)) - taken))
        loop.progress()
        await asyncio.sleep(BACKLOG_S)


def _after(last: int, incarnation: int, key: str, records: list[Record]) -> list[Record]:
    """Return the records numbered by `key` after `last`, each number once, as a step retrained after a crash is recorded again.

    A later incarnation of the run begins at its own number.
    """
    new: list[Record] = []
    for record in records:
        if (now := _incarnation(record)) < incarnation:
            continue  # a late record of steps that were undone
        if now > incarnation:
            incarnation, last = now, int(record[key]) - 1
        if record[key] > last:
            new.append(record)
            last = int(record[key])
    return new


def _incarnation(record: Record) -> int:
    return int(record.get("run/incarnation", 0))
