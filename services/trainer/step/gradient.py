"""The gradient of a mini-batch: summed row by row, and stepped with.

Guarantees: the sum depends on the rows and their order alone, not on when each is added; with `trainer.deterministic`,
zero_stage 0 and float32 (or adapters), it depends neither on their order nor on the ranks that have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.config import RunConfig
from services.trainer import losses
from services.trainer.model.attention.packing import to_device
from services.trainer.ranks import World
from services.trainer.step import deepspeed_engine
from services.trainer.step.batches import PackedRow
from services.trainer.step.fixed_point import FixedPointSum
from services.trainer.step.metrics import Clock, StepMetrics
from services.trainer.step.reference import ReferencePolicy


class NonFinite(RuntimeError):
    """The loss or its gradient is not finite; the weights of this process must not be used further."""


@dataclass(frozen=True)
class TrainedRow:
    """Results of a row whose gradient was added."""

    learning: Tensor  # [R] bool, which of its tokens remain to be learnt
    gap: Tensor  # [R] float32, trainer - behaviour logprobs


class GradientSum:
    """Accumulates the gradient of a mini-batch in a DeepSpeed engine on one rank."""

    def __init__(self, config: RunConfig, engine: Any, reference: ReferencePolicy | None, world: World, leads: bool) -> None:
        """`leads`: whether this rank contributes where values of ranks are summed."""
        self._config, self._engine, self._reference, self._world, self._leads = config, engine, reference, world, leads
        exact = config.trainer.deterministic and deepspeed_engine.keeps_gradients(config)
        self._exact = FixedPointSum(weight for weight in engine.module.parameters() if weight.requires_grad) if exact else None

    def add(
        self,
        row: PackedRow,
        old: Tensor | None,
        shares: Tensor,
        divisor: float,
        learns: bool,
        last: bool,
        metrics: StepMetrics,
        clock: Clock,
    ) -> TrainedRow:
        """Run the forward pass of a row, and the backward pass if it `learns`. Collective. `last`: of its mini-batch."""
        device = self._world.device
        row, reference = row.to(device), None
        if self._reference is not None:
            with clock.phase("reference"):
                reference = score_frozen(self._reference.module, row)
        with clock.phase("forward"), torch.set_grad_enabled(learns):
            if self._engine.training != learns:
                self._engine.train(learns)
            self._engine.set_gradient_accumulation_boundary(last and self._exact is None)
            logprobs, entropy = self._engine(row)
            tokens = losses.Tokens(
                logprobs=logprobs,
                old=logprobs.detach() if old is None else old,
                behaviour=row.behaviour,
                reference=reference,
                advantages=row.advantages,
                weights=row.weights,
                shares=to_device(shares, device),
                entropy=entropy if self._config.loss.entropy_coefficient > 0 else entropy.detach(),
                samples=row.sample_of_token,
                responses=len(row.samples),
            )
            output = losses.compute(tokens, self._config.loss, divisor, row.counted, self._config.from_behaviour)
        if self._leads:
            metrics.add(output.sums, output.maxima)
        if learns:
            with clock.phase("backward"):
                self._backward(output.loss)
        start = tokens.logprobs.detach() if self._config.from_behaviour else tokens.old
        return TrainedRow(output.learning, start - row.behaviour)

    def update(self, step: int, rows: int) -> float:
        """Clip the gradient of this rank's `rows` rows and step. Returns its norm before clipping. Collective."""
        if self._exact is not None:
            self._exact.reduce(rows * self._world.size)
        return self._step(step)

    def _step(self, step: int) -> float:
        if deepspeed_engine.keeps_gradients(self._config):
            self._engine.set_gradient_accumulation_boundary(True)
            gradients = [weight.grad for weight in self._engine.module.parameters() if weight.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            refuse("the gradient's norm", norm, step)
            factor = min(1.0, self._config.optimizer.max_grad_norm / (norm + 1e-6))
            for gradient in gradients:
                gradient.mul_(factor)
            self._engine.step()
            return norm
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        refuse("the gradient's norm", norm, step)
        return norm

    def _backward(self, loss: Tensor) -> None:
        if self._exact is not None:
            self._engine.backward(loss)
            self._exact.add()
        else:
            self._engine.backward(loss * self._world.size)  # DeepSpeed averages over ranks; the formula sums


def refuse(name: str, value: float, step: int) -> None:
    """Raise `NonFinite` if a value of a step is not finite."""
    if not math.isfinite(value):
        raise NonFinite(
            f"step {step}: {name} is {value}. The step is not committed; lower optimizer.learning_rate or look for "
            "damaged weights or payloads, and resume from the last checkpoint"
        )


@torch.no_grad()
def score_frozen(module: Any, row: PackedRow) -> Tensor:
    """Return a module's logprobs of a row's tokens, [R] float32, without a gradient. Collective."""
    return module(row)[0]
