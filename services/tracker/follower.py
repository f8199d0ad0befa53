"""Brings the records of a run to one tracker.

Guarantees: every recorded step and evaluation round reaches the tracker, in order, however often the tracker or this process
dies. What a crash may have cut off is written again, so a step may appear twice, with the same values. A failing tracker is
logged once and retried; only this follower waits for it.

Waits for: the records of a run, of which Redis keeps what the tracker does not have yet; the tracker.
Unblocked by: `POLL_S`; the end of the run.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from services.config import RunConfig
from services.operations.figures import aliases
from services.operations.history import EVALUATED, INCARNATION, STEP, Cursor
from services.operations.observe import BATCH, RunFeed
from services.protocol.errors import StoreError
from services.runtime.atomic_folders import replace
from services.runtime.loops import Loop, is_set_within
from services.store import Store
from services.tracker.metrics import TrackerMetrics

if TYPE_CHECKING:
    from services.tracker.event_files import EventFiles
    from services.tracker.wandb_run import WandbRun

log = structlog.get_logger()

POLL_S = 1.0  # the longest delay until a step reaches its tracker
RETRY_S = 10.0  # seconds until a failed tracker is retried
BACKLOG_S = 2.0  # seconds between reads of the last recorded step

Record = dict[str, float]
"""Metrics by name, with the keys `step` and `time_s` for a training step, and `eval/version` for an evaluation round."""


class Position(msgspec.Struct):
    """What a tracker has stored durably, in a file next to its own."""

    identity: str
    """Identifies the run, for trackers that need it: the same after every restart."""
    steps: Cursor = msgspec.field(default_factory=Cursor)
    rounds: Cursor = msgspec.field(default_factory=Cursor)


class Follower:
    """Follows a run for the tracker `name`, which writes under `folder`."""

    def __init__(
        self, name: str, config: RunConfig, store: Store, folder: Path, stopping: asyncio.Event, metrics: TrackerMetrics
    ) -> None:
        self.name, self.done, self.metrics = name, asyncio.Event(), metrics
        self.written = Cursor()
        """The last step written to the tracker, durably or not."""
        self._config, self._folder, self._stopping = config, folder, stopping
        self._feed = RunFeed(store, config.fleet.ttl_s)
        self._tracker: EventFiles | WandbRun | None = None
        self._reached: Position | None = None  # what the tracker has, durably or not; None: unknown
        self._failing = False

    async def follow(self, loop: Loop) -> None:
        """Follow the run until it ends or `stopping` is set, and everything recorded by then was tried once more."""
        position = self._begin()
        written = False
        while True:
            last = self._stopping.is_set()  # read before polling, so that everything recorded by then is written
            try:
                steps, rounds = await self._feed.records()
            except StoreError:
                if last:
                    break  # Redis stopped first
                raise
            written = await self._write(position, steps, rounds)
            loop.progress()
            if not written:
                self._reached = None  # also if the file cannot be read now, which restarts the loop
                position = self._begin()
            elif max(len(steps), len(rounds)) == BATCH:
                continue
            if last:
                break
            await is_set_within(self._stopping, POLL_S if written else RETRY_S)
        if not written:
            log.warning(
                "records left in Redis, to be written on resume", tracker=self.name, written_to_step=position.steps.number
            )
        await self._close(position)
        self.done.set()

    def _begin(self) -> Position:
        """Read all records again after what the tracker has. After a failure of Redis alone it is still open."""
        self._feed.rewind()
        self._reached = position = self._reached or self._position()
        self.written = position.steps
        return position

    async def _write(self, position: Position, steps: list[Record], rounds: list[Record]) -> bool:
        """Write what is new and advance `position`. Return False if the tracker failed."""
        after = copy.deepcopy(position)
        steps = [record for record in steps if after.steps.takes(record, STEP)]
        rounds = [record for record in rounds if after.rounds.takes(record, EVALUATED)]
        if not steps and not rounds:
            return True
        started = time.monotonic()
        if error := await self._attempt(lambda: self._hand_over(position.identity, steps, rounds)):
            if not self._failing:
                log.warning("tracker failed, retrying", tracker=self.name, every_s=RETRY_S, error=str(error), exc_info=error)
            self._failing = True
            self.metrics.failures[self.name].inc()
            await self._close(position)
            return False
        if self._failing:
            log.info("tracker works again", tracker=self.name)
        self._failing = False
        self.metrics.write_s[self.name].observe(time.monotonic() - started)
        self.metrics.written[self.name].inc(len(steps) + len(rounds))
        position.steps, position.rounds, self.written = after.steps, after.rounds, after.steps
        if self._tracker is not None and self._tracker.durable:
            self._save(position)
        return True

    def _hand_over(self, identity: str, steps: list[Record], rounds: list[Record]) -> None:
        if self._tracker is None:
            self._tracker = open_tracker(self.name, self._config, self._folder, identity)
        self._tracker.write([{**step, **aliases(step)} for step in steps], rounds)

    async def _close(self, position: Position) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        if error := await self._attempt(tracker.close):
            log.warning("tracker could not be closed", tracker=self.name, error=str(error))
        else:
            self._save(position)

    async def _attempt(self, work: Callable[[], object]) -> Exception | None:
        """Call something of the tracker in a thread, and return what it raised."""
        try:
            await asyncio.to_thread(work)
        except Exception as error:  # a tracker's package may raise anything; no record may be lost by it
            return error
        return None

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
            log.warning("writing all records again, since a file is damaged", file=str(self._path), error=str(error))
        self._save(position := Position(secrets.token_hex(4)))
        return position

    def _save(self, position: Position) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        replace(self._path, msgspec.json.encode(position))


def open_tracker(name: str, config: RunConfig, folder: Path, identity: str) -> EventFiles | WandbRun:
    """Return the tracker `name`, which writes under `folder`. Each imports its own library, which takes seconds."""
    if name == "tensorboard":
        from services.tracker.event_files import EventFiles

        return EventFiles(folder / name)
    from services.tracker.wandb_run import WandbRun

    return WandbRun(config, folder, identity)  # creates a folder `wandb` in it


async def show_backlog(store: Store, followers: Sequence[Follower], metrics: TrackerMetrics, loop: Loop) -> None:
    """Export how far the trackers are behind, including any that hang."""
    while True:
        last, restores = await store.monitor.last_record(), await store.samples.begun()
        for follower in followers:
            metrics.backlog[follower.name].set(backlog(last, follower.written, restores))
        loop.progress()
        await asyncio.sleep(BACKLOG_S)


def backlog(last: Record, written: Cursor, restores: Mapping[int, int]) -> int:
    """Return how many steps up to the `last` recorded one a tracker lacks.

    `restores`: incarnation that a restore began -> its first step, from which the steps are to be written again.
    """
    begun = [step - 1 for life, step in restores.items() if written.incarnation < life <= last.get(INCARNATION, 0.0)]
    return max(0, int(last.get(STEP, -1)) - min([written.number, *begun]))
