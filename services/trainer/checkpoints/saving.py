"""When the trainer saves, and what a checkpoint that cannot be written does to the run; on rank 0.

Guarantees: a periodic checkpoint that fails costs nothing but its time, as Redis keeps the plans since the last one; the last of
a run, or of a process that was told to stop, is written or its failure told. What Redis has to keep is bounded: in steps by
`checkpoint.every_steps`, in bytes by `redis.max_memory_mib`, near which one is written early.
Waits for: the other ranks, the disk, Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import structlog

from services.config import RunConfig
from services.runtime.loops import Broken
from services.store import RunState, Store
from services.trainer.checkpoints.recovery import Recovery
from services.trainer.rank_commands import RankCommands

log = structlog.get_logger()

EARLY = 0.7
"""Share of Redis' memory in use above which a checkpoint is written, so that the steps it covers are forgotten. Dataprep goes on
issuing prompts up to a larger share (services/dataprep/replay/memory.py)."""


class Saving:
    """Writes checkpoints. `call` awaits the store's answers, `say` tells the fleet."""

    def __init__(
        self, config: RunConfig, store: Store, fence: int, commands: RankCommands, recovery: Recovery, call: Callable[[Any], Any],
        say: Callable[..., None],
    ) -> None:  # fmt: skip
        self._config, self._store, self._fence, self._commands, self._recovery = config, store, fence, commands, recovery
        self._call, self._say = call, say
        self._relieved = -1  # the last step saved early; Redis need not have got smaller by it
        self._heeded = ""  # the wish for a checkpoint that was last seen to
        self.last = -1
        """The last step that a checkpoint holds."""
        self.failed = 0
        """Checkpoints that could not be written since."""

    def due(self, step: int) -> bool:
        """Whether one is due after `step`, which is not the last."""
        return (step + 1) % self._config.checkpoint.every_steps == 0 and step + 1 < self._config.run.steps

    def relieve(self, step: int) -> None:
        """Save early when Redis is nearly full, so that it may forget; then not again before it was emptier for once."""
        used, limit = self._call(self._store.run.memory(self._config.redis.max_memory_mib << 20))
        if not limit or used < EARLY * limit:
            self._relieved = -1
        elif self._relieved < 0 and step > self.last:
            self._relieved = step
            log.info("saving early, so that Redis may forget", used_mib=used >> 20, limit_mib=limit >> 20)
            self.save(step, must=False)

    def heed(self, state: RunState, step: int) -> None:
        """Save because somebody asked for it: once for each wish, so that a disk that is full is left in peace."""
        if not state.checkpoint or state.checkpoint == self._heeded or step < 0:
            return
        self._heeded = state.checkpoint
        if step == self.last:
            self._call(self._store.steps.checkpointed(self._fence, step))
        else:
            self.save(step, must=False)

    def save(self, step: int, must: bool = True) -> None:
        """Write the checkpoint of `step`, unless there is one. Raises `Broken` when one that `must` be cannot be written.

        Else the next that is due is another attempt.
        """
        if step == self.last or self._recovery.stay_in_step(step).committed_step > step:
            return  # told to stop while it trained again what Redis has the plans of: the next trainer does
        self._say(phase="saving")
        started = time.monotonic()
        if problem := cast(str, self._commands.lead("save", step)):
            self.failed += 1
            self._call(self._store.run.checkpoint_failed(f"step {step}, attempt {self.failed}: {problem}", self._fence))
            if must:
                raise Broken(problem)
            log.warning("checkpoint not written", step=step, last=self.last, failed=self.failed, why=problem)
            return
        log.info("checkpoint written", step=step, seconds=round(time.monotonic() - started, 3))
        self.last, self.failed = step, 0
        self._recovery.saved()
        self._call(self._store.steps.checkpointed(self._fence, step))
        self._call(self._store.steps.retire())
