"""The policy in training: DeepSpeed engine, reference policy, one method per training step.

Guarantees: the gradient of a mini-batch is that of the written formula (docs/semantics.md) for any number of ranks, any
packing and any split into micro-batches; `load` of what `save` wrote continues bit by bit where it left off.

Waits for: the other ranks, in every method but the constructor's checks. Each runs the same methods in the same order; a
rank that dies fails the others' collectives at once (gloo) or after `trainer.step_timeout_s`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.protocol.config import ConfigError, RunConfig
from services.protocol.messages import StepPlan
from services.trainer import engine as deepspeed_engine
from services.trainer import export, loss, model, ranks
from services.trainer.batches import PlanMismatch, Row
from services.trainer.ranks import World
from services.trainer.state_files import DurableFiles, StateError, read_state
from services.trainer.tally import Clock, Tally


class NonFinite(RuntimeError):
    """The loss or its gradient is no number; the weights of this process must not be used any more."""


class Policy:
    """The model of a run on one rank.

    Attributes: `module` (the Hugging Face model), `engine` (DeepSpeed's), `zero_stage`, `world`, `device`.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        if world.size != config.trainer.ranks:
            raise ConfigError(f"trainer.ranks = {config.trainer.ranks}, but {world.size} trainer ranks were started (WORLD_SIZE)")
        if config.trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
        deepspeed_engine.seed(config.run.seed, config.trainer.deterministic)
        self.config, self.world, self.device = config, world, world.device
        self.zero_stage: int = config.trainer.zero_stage
        world.join(config.trainer.step_timeout_s)
        scorer = self._scorer()
        self.module = scorer.model
        self.engine = deepspeed_engine.start(config, scorer)
        self._files = DurableFiles()
        self.engine.checkpoint_engine = self._files
        # The helper script DeepSpeed copies into a checkpoint could fail on rank 0 alone and leave the others waiting.
        self.engine._copy_recovery_script = lambda folder: None
        self._reference = (
            deepspeed_engine.start_reference(config, self._scorer(), self.device) if config.loss.kl_beta > 0 else None
        )

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.module.config.get_text_config().vocab_size

    def train(self, rows: Sequence[Row], plan: StepPlan) -> dict[str, float]:
        """One training step: as many optimizer steps as the plan has mini-batches. Collective.

        `rows` are this rank's, in the plan's order. Returns metrics over all ranks, equal on every rank; `time/...` are
        this rank's seconds. Raises `PlanMismatch` before anything is trained, `NonFinite` when it is too late.
        """
        ranks.agree(self._fault(rows, plan), PlanMismatch)
        started, clock = time.perf_counter(), Clock(self.device)
        rows = [row.to(self.device) for row in rows]
        batches = _split(list(range(len(rows))), plan.mini_batch_rows)
        excluded = self._excluded(rows, batches)
        old: list[Tensor | None] = [None] * len(rows)
        if len(batches) > 1:
            with clock.phase("old"):
                self.engine.eval()
                old = [_score_frozen(self.engine, row) for row in rows]
        self.engine.train()
        rate = self._set_learning_rate(plan.step)
        tally, norms = Tally(self.device), []
        for batch, planned, left_out in zip(batches, plan.denominators, excluded, strict=True):
            divisor = loss.corrected_denominator(planned, left_out, self.config.loss.denominator)
            for index in batch:
                self._micro_batch(rows[index], old[index], divisor, index == batch[-1], tally, clock)
            with clock.phase("step"):
                norms.append(self._optimizer_step(plan.step))
        report = tally.report()
        _refuse("the loss", report["loss/train/sum"], plan.step)
        return report | {
            "excluded/train/tokens": sum(excluded),
            "gradient/train/norm": sum(norms) / len(norms),
            "learning_rate/train/value": rate,
            "time/train/total_s": time.perf_counter() - started,
            **{f"time/train/{phase}_s": seconds for phase, seconds in clock.seconds.items()},
        }

    def save(self, folder: Path) -> None:
        """Write this rank's state (weights, optimizer, random generators) into the existing `folder`. Collective.

        Every rank raises `StateError` if any could not write.
        """
        self._files.problem = ""
        self.engine.save_checkpoint(str(folder), tag="state", save_latest=False)
        self._files.save(deepspeed_engine.random_state(), str(folder / f"random-{self.world.rank}.pt"))
        ranks.agree(self._files.problem, StateError)

    def load(self, folder: Path) -> None:
        """Take up the state that `save` wrote, with as many ranks and the same ZeRO stage. Collective.

        Call it on a policy that has not trained yet: ZeRO-3 cannot load over weights in use.
        """
        state, problem = read_state(folder / f"random-{self.world.rank}.pt")
        ranks.agree(problem, StateError)
        path, _ = self.engine.load_checkpoint(str(folder), tag="state")
        ranks.agree("" if path else f"{folder} holds no DeepSpeed state", StateError)
        deepspeed_engine.set_random_state(state)

    def export_hf(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder (safetensors, config, tokenizer). Collective; see `export.write`."""
        export.write(self.module, self.config.model.path, folder, self.world.rank, self.zero_stage)

    def _scorer(self) -> model.Scorer:
        trainer = self.config.trainer
        return model.load(
            self.config.model, self.config.sampling.temperature, trainer.logprob_chunk_tokens, trainer.gradient_checkpointing
        )

    def _fault(self, rows: Sequence[Row], plan: StepPlan) -> str:
        """What is wrong with a plan, or with the rows this rank got for it."""
        if plan.ranks != self.world.size:
            return f"step {plan.step} was planned for {plan.ranks} ranks, trainer.ranks is {self.world.size}"
        if len(rows) != plan.rows_per_rank or sum(plan.mini_batch_rows) != plan.rows_per_rank:
            return (
                f"step {plan.step} has {plan.rows_per_rank} rows per rank in mini-batches of {plan.mini_batch_rows}, "
                f"but there are {len(rows)} rows"
            )
        if len(plan.denominators) != len(plan.mini_batch_rows) or min(plan.mini_batch_rows, default=0) < 1:
            return f"step {plan.step}: mini-batches of {plan.mini_batch_rows} rows, denominators {plan.denominators}"
        if not all(math.isfinite(value) and value >= 0 for value in plan.denominators):
            return f"step {plan.step}: denominators {plan.denominators} must be finite and not negative"
        return ""

    def _excluded(self, rows: list[Row], batches: list[list[int]]) -> list[float]:
        """Tokens without a finite behaviour logprob, per mini-batch, over all ranks."""
        counts = [sum((~loss.counted(rows[i].behaviour)).sum() for i in batch) for batch in batches]
        return ranks.total(torch.tensor([float(count) for count in counts], dtype=torch.float64, device=self.device)).tolist()

    def _micro_batch(self, row: Row, old: Tensor | None, divisor: float, last: bool, tally: Tally, clock: Clock) -> None:
        reference = None
        if self._reference is not None:
            with clock.phase("reference"):
                reference = _score_frozen(self._reference, row)
        with clock.phase("forward"):
            self.engine.set_gradient_accumulation_boundary(last)
            logprobs, entropy = _score(self.engine, row)
            tokens = loss.Tokens(
                logprobs=logprobs,
                old=logprobs.detach() if old is None else old,
                behaviour=row.behaviour,
                reference=reference,
                advantages=row.advantages,
                entropy=entropy.detach(),
                samples=row.sample_of_token,
            )
            output = loss.compute(tokens, self.config.loss, divisor)
        tally.add(output.sums, output.maxima)
        with clock.phase("backward"):
            self.engine.backward(output.loss * self.world.size)  # DeepSpeed averages over ranks; the formula sums

    def _optimizer_step(self, step: int) -> float:
        """Clip, update and return the gradient's norm before clipping."""
        if deepspeed_engine.clips_itself(self.config):
            norm = float(torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), self.config.optimizer.max_grad_norm))
            _refuse("the gradient's norm", norm, step)
            self.engine.step()
            return norm
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        _refuse("the gradient's norm", norm, step)
        return norm

    def _set_learning_rate(self, step: int) -> float:
        rate = deepspeed_engine.learning_rate(self.config.optimizer, step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        return rate


def _score(module: Any, row: Row) -> tuple[Tensor, Tensor]:
    return module(row.input_ids, row.positions, row.packing, row.predictors, row.targets)


def _refuse(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise NonFinite(
            f"step {step}: {name} is {value}. The step must not be committed; lower optimizer.learning_rate or look for "
            "damaged weights or payloads, and resume from the last checkpoint"
        )


@torch.no_grad()
def _score_frozen(module: Any, row: Row) -> Tensor:
    return _score(module, row)[0]


def _split(items: list[int], sizes: Sequence[int]) -> list[list[int]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [items[end - size : end] for end, size in zip(ends, sizes, strict=True)]
