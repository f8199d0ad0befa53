"""What every trainer rank can do: train a prepared step, send weights, save, restore, export.

Guarantees: a rank fetches the payloads of its own rows only, and those of the next step while the current one trains.
Waits for: Redis, the collectives of the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from services.config import RunConfig
from services.protocol.errors import Damaged
from services.protocol.messages import StepPlan
from services.runtime.atomic_folders import FolderError
from services.runtime.loops import Broken
from services.runtime.portal import Portal
from services.store import Store
from services.trainer import ranks
from services.trainer.checkpoints.folder import CheckpointError, Checkpoints, Saved
from services.trainer.model import export, lora
from services.trainer.step import batches
from services.trainer.step.logprob_gaps import GapSender
from services.trainer.step.policy import Policy, Trained
from services.trainer.step.prefetch import REFUSALS, Fetched, Prefetch
from services.weights.transport import make_sender

log = structlog.get_logger()


class Worker:
    """Performs one rank's operations when rank 0 calls them."""

    def __init__(self, config: RunConfig, store: Store, portal: Portal, policy: Policy, folder: Path) -> None:
        self.config, self.policy = config, policy
        build = partial(batches.build, vocabulary=policy.vocabulary, row_tokens=config.trainer.row_tokens)
        self.prefetch = Prefetch(portal, store, policy.data_rank, build)
        self.gaps = GapSender(portal, store, policy.data_rank, config.samples.share)
        self.checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
        self.copy_state: Callable[[Path, int], None] | None = None
        """Writes dataprep's state after a step into a checkpoint; set on rank 0 only."""
        self.restored: Saved | None = None
        """The checkpoint that this process restored."""
        self.model_folder = folder / "model"
        weights = lora.trained_weights(policy.module, config.lora)
        self.sender = make_sender(config, weights, policy.world.rank, policy.world.size, ranks.gather)

    def operations(self) -> dict[str, Callable[[Any], object]]:
        """Return the operations by name, for `RankCommands`."""
        named = (self.train, self.send, self.save, self.restore, self.export)
        return {operation.__name__: operation for operation in named}

    def train(self, step: int) -> tuple[StepPlan, Trained] | Damaged:
        """Train a prepared step. Collective. Returns its plan and results.

        If payloads of any rank cannot be trained on, trains nothing and returns which ones, on every rank.
        """
        with structlog.contextvars.bound_contextvars(step=step):
            return self._train(step)

    def _train(self, step: int) -> tuple[StepPlan, Trained] | Damaged:
        started = time.perf_counter()
        took = self._fetch(step)
        if isinstance(took, Damaged):
            return took
        fetched, ahead_s = took
        waited_s = time.perf_counter() - started
        if step + 1 < self.config.run.steps:
            self.prefetch.begin(step + 1)
        trained = self.policy.train(fetched.rows, fetched.plan)
        if trained.gaps is not None:
            self.gaps.begin(step, fetched.rows, trained.gaps, fetched.plan.ranks)
        metrics = trained.metrics | {"time/train/fetch_s": waited_s, "time/train/prefetch_s": ahead_s}
        return fetched.plan, replace(trained, metrics=metrics)

    def _fetch(self, step: int) -> tuple[Fetched, float] | Damaged:
        """Return this rank's part of the plan that all ranks have, and the seconds of its background fetch.

        If Redis loses a plan between two ranks' fetches, dataprep makes another one, and all ranks fetch again.
        """
        while True:
            took: tuple[Fetched, float] | None = None
            problem, damaged = "", dict[str, str]()
            try:
                took = self.prefetch.take(step)
            except Damaged as error:
                damaged = error.reasons
            except REFUSALS as error:
                problem = f"cannot train step {step}: {error}"
            told = ranks.gather((problem, damaged, took[0].digest if took else ""))
            ranks.refuse([problem for problem, _, _ in told], Broken)  # otherwise the others would wait for this rank in the step
            if found := {name: why for _, of_rank, _ in told for name, why in of_rank.items()}:
                return Damaged(found)
            if len({digest for _, _, digest in told}) == 1:
                assert took is not None
                return took
            log.warning("ranks fetched different plans of a step, which Redis must have lost in between: fetching again")

    def close(self) -> None:
        """Leave the weight group and drop prefetched data. Redis is not used afterwards."""
        self.sender.close()
        self.prefetch.close()
        self.gaps.close()

    def send(self, given: tuple[int, int, bool]) -> None:
        """Send the weights, with the arguments of `Sender.send`. Collective among ranks."""
        self.sender.send(*given)

    def save(self, step: int) -> str:
        """Write the checkpoint after `step`. Collective. Returns why that failed, or an empty string, on every rank."""
        try:
            copy = self.copy_state
            self.checkpoints.save(self.policy, step, (lambda folder: copy(folder, step)) if copy else None)
        except CheckpointError as error:
            return str(error)
        return ""

    def restore(self, step: int) -> int:
        """Load the checkpoint of `step`, or for -1 the latest one if any. Collective. Returns its step, or -1."""
        try:
            self.checkpoints.try_out(self.policy.world.rank)
            self.restored = self.checkpoints.restore(self.policy, step if step >= 0 else None)
        except CheckpointError as error:
            raise Broken(str(error)) from error
        return -1 if self.restored is None else self.restored.step

    def export(self, step: int) -> None:
        """Write the model after `step` as a Hugging Face folder. Collective."""
        try:
            policy = self.policy
            export.write(policy.module, self.config, step, self.model_folder, policy.world.rank, policy.zero_stage)
        except FolderError as error:
            raise Broken(str(error)) from error
