"""What every trainer rank can do: train a prepared step, send weights, save, export.

Guarantees: a rank fetches the payloads of its own rows and no others.
Waits for: Redis, the other ranks' collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from services.protocol.codec import CorruptMessage
from services.protocol.config import RunConfig
from services.protocol.errors import StoreError
from services.protocol.messages import StepPlan
from services.protocol.store import Store
from services.runtime.loops import Broken
from services.runtime.portal import Portal
from services.trainer import batches, ranks
from services.trainer.checkpoint import CheckpointError, Checkpoints
from services.trainer.policy import Policy
from services.trainer.weights import WeightSender


class Worker:
    """One rank's operations, as the crew calls them."""

    def __init__(self, config: RunConfig, store: Store, portal: Portal, policy: Policy, folder: Path) -> None:
        self.config, self.store, self.call, self.policy = config, store, portal.call, policy
        self.checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
        self.model_folder = folder / "model"
        self.sender = WeightSender(config, policy.module, policy.world.rank)

    def operations(self) -> dict[str, Callable[[int], object]]:
        """By name, for the crew."""
        return {"train": self.train, "send": self.send, "save": self.save, "restore": self.restore, "export": self.export}

    def train(self, step: int) -> tuple[StepPlan, dict[str, float]]:
        """Train a prepared step. Collective. Returns its plan and the metrics."""
        started = time.perf_counter()
        plan, rows, problem = None, [], ""
        try:
            plan, rows = self._fetch(step)
        except (StoreError, CorruptMessage, batches.PlanMismatch) as error:
            problem = str(error)  # told to all ranks, else the others would wait for this one inside the step
        ranks.agree(problem and f"step {step} cannot be trained: {problem}", Broken)
        assert plan is not None
        fetched = time.perf_counter()
        metrics = self.policy.train(rows, plan)
        return plan, metrics | {"time/train/fetch_s": fetched - started}

    def _fetch(self, step: int) -> tuple[StepPlan, list[batches.Row]]:
        plan = self.call(self.store.plan(step))
        if plan is None:
            raise StoreError(f"the plan of step {step} is gone from Redis, though no checkpoint covers it")
        rank_plan = self.call(self.store.rank_plan(step, self.policy.world.rank))
        payloads = self.call(self.store.payloads(sorted({sample.payload for row in rank_plan.rows for sample in row})))
        rows = batches.build(rank_plan, payloads, vocabulary=self.policy.vocabulary, row_tokens=self.config.trainer.row_tokens)
        return plan, rows

    def send(self, _: int) -> None:
        """Broadcast the weights to the standing group. Collective among ranks."""
        self.sender.send()

    def save(self, step: int) -> None:
        """Write the checkpoint after `step`. Collective."""
        try:
            self.checkpoints.save(self.policy, step, {})
        except CheckpointError as error:
            raise Broken(str(error)) from error

    def restore(self, _: int) -> int:
        """Take up the last checkpoint, if any. Collective. Returns its step, or -1."""
        try:
            saved = self.checkpoints.restore(self.policy)
        except CheckpointError as error:
            raise Broken(str(error)) from error
        return -1 if saved is None else saved.step

    def export(self, _: int) -> None:
        """Write the model as a Hugging Face folder. Collective."""
        self.policy.export_hf(self.model_folder)
