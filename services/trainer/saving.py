"""When the trainer saves a checkpoint, and what a failed checkpoint means for the run; on rank 0.

Guarantees: a periodic checkpoint that fails costs only its time, because Redis keeps the plans since the last one; the last
checkpoint of a run, or of a process that was told to stop, is written or its failure is reported. What Redis has to keep is
bounded: in steps by `checkpoint.every_steps`, in bytes by the server's `maxmemory`; close to that limit a checkpoint is written
early.
Waits for: the other ranks, the disk, Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import structlog

from services.runtime.loops import Broken
from services.store import RunState
from services.trainer.recovery import Recovery

log = structlog.get_logger()

EARLY = 0.7
"""Share of Redis' memory in use above which a checkpoint is written early, so that Redis can drop the steps it covers. Dataprep
keeps issuing prompts up to a larger share (services/dataprep/brakes.py).
"""


class Saving:
    """Writes checkpoints. `say` updates the status that the fleet sees."""

    def __init__(self, recovery: Recovery, say: Callable[..., None]) -> None:
        self._recovery, self._config, self._store = recovery, recovery.config, recovery.store
        self._fence, self._call, self._say = recovery.fence, recovery.call, say
        self._saved_due = -1  # the last step saved because a checkpoint was due
        self._saved_early = -1  # the last step saved early; Redis may not have shrunk since
        self._handled = ""  # the last checkpoint request that was handled
        self.last = -1
        """Last step covered by a checkpoint."""
        self.failed = 0
        """Checkpoints that failed since then."""
        self.before: Callable[[], None] = lambda: None
        """Called before a checkpoint is written: what its step still has to record, no later trainer would."""

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`, which is not the last one."""
        return (step + 1) % self._config.checkpoint.every_steps == 0 and step + 1 < self._config.run.steps

    def save_if_due(self, step: int) -> None:
        """Save if a checkpoint is due after `step`: once per step, like a request."""
        if self.due(step) and step > self._saved_due:
            self._saved_due = step
            self.save(step, must=False)

    def save_if_redis_is_nearly_full(self, step: int) -> None:
        """Save early when Redis is nearly full, so that it can drop old steps. Save again only after memory use has fallen
        once.
        """
        used, limit = self._call(self._store.run.memory())
        if not limit or used < EARLY * limit:
            self._saved_early = -1
        elif self._saved_early < 0 and step > self.last:
            self._saved_early = step
            log.info("saving early, so that Redis can free memory", used_mib=used >> 20, limit_mib=limit >> 20)
            self.save(step, must=False)

    def save_if_requested(self, state: RunState, step: int) -> None:
        """Save if a checkpoint was requested: once per request, so that a full disk is not retried forever."""
        if not state.checkpoint or state.checkpoint == self._handled or step < 0:
            return
        self._handled = state.checkpoint
        if step == self.last:
            self._call(self._store.steps.checkpointed(self._fence, step))
        else:
            self.save(step, must=False)

    def save(self, step: int, must: bool = True) -> None:
        """Write the checkpoint of `step`, unless it exists. Raises `Broken` if it fails and `must` is true.

        Otherwise the next due checkpoint is the next attempt.
        """
        if step == self.last or self._recovery.stay_in_step(step).committed_step > step:
            return  # stopped while retraining steps whose plans Redis has: the next trainer retrains them
        self.before()
        self._say(phase="saving")
        started = time.monotonic()
        if problem := cast(str, self._recovery.commands.lead("save", step)):
            self.failed += 1
            self._call(self._store.run.checkpoint_failed(f"step {step}, attempt {self.failed}: {problem}", self._fence))
            if must:
                raise Broken(problem)
            log.warning("failed to write checkpoint", step=step, last=self.last, failed=self.failed, why=problem)
            return
        log.info("checkpoint written", step=step, seconds=round(time.monotonic() - started, 3))
        self.last, self.failed = step, 0
        self._recovery.saved()
        self._call(self._store.steps.checkpointed(self._fence, step))
        self._call(self._store.steps.retire())
