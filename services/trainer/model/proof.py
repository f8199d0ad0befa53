"""Proves a model before it is trained: packed rows with shared prompts against the model alone, one sequence at a time.

Guarantees: a proof holds only if logprobs and the norm of their gradient agree up to rounding, which is measured.

The model alone is transformers' own forward pass in evaluation mode, with its own attention, output layer and logits. It knows
nothing of this package, so whatever packed training leaves out shows: a mask, a cap, dropout, state that leaks between responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from services.trainer.model.attention import NAME
from services.trainer.model.attention.packing import Packing

GROUPS = ((9, (14, 6, 11)), (5, (16,)), (12, (8, 10)))
"""Tokens of the prompt and of the responses of each group of the batch."""

LONG_GROUP = (40, (270, 130))
"""Another group on a GPU, whose kernels of attention compute 64 to 128 tokens at a time, and differ for sequences of fewer."""

LARGEST_GAP = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Gap of logprobs, in nats, that always counts as rounding."""

LARGEST_NORM_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""The same for the norm of the gradient, as a share of it."""

ROUNDINGS = 5.0
"""A gap may be this many times what one rounding of the embeddings causes. In bfloat16 it is 0.1 to 1.4 times that, also for
models with experts, where a rounding sends tokens to others.
"""

IMPLEMENTATION = "eager"
"""Attention of the model alone: transformers' simplest, which every model has."""

Score = Callable[[Tensor, Tensor, Packing, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Proof:
    """How far packed rows are from the model alone, and how far rounding alone would take them."""

    gap: float  # nats, the largest of any token
    norm_gap: float  # of the gradient's norm, as a share of it
    rounding: float  # nats, the largest change of a logprob when embeddings change by one unit in the last place
    norm_rounding: float  # of the gradient's norm, as a share of it
    dtype: str = "float32"
    compiled: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the differences are rounding."""
        dtype = getattr(torch, self.dtype)
        return self.gap <= max(LARGEST_GAP[dtype], ROUNDINGS * self.rounding) and self.norm_gap <= max(
            LARGEST_NORM_GAP[dtype], ROUNDINGS * self.norm_rounding
        )


@dataclass(frozen=True)
class ProofRow:
    """The batch as one packed row and as whole sequences; arguments as in `batches.PackedRow`."""

    input_ids: Tensor
    positions: Tensor
    packing: Packing
    predictors: Tensor
    targets: Tensor
    factors: Tensor  # [R], a weight of each logprob, so that errors do not cancel in the gradient
    sequences: tuple[tuple[Tensor, int], ...]  # each whole sequence, and the length of its prompt

    @classmethod
    def of(cls, vocabulary: int, device: torch.device) -> ProofRow:
        """Build the batch from tokens of the middle of the vocabulary, where no special ones are."""
        random = np.random.default_rng(0)
        ids: list[int] = []
        positions, predictors, targets, lengths, prompts, sequences = [], [], [], [], [], []
        for before, responses in (*GROUPS, LONG_GROUP) if device.type == "cuda" else GROUPS:
            begin, prompt = len(ids), random.integers(vocabulary // 8, vocabulary // 2, before).tolist()
            for number, count in enumerate(responses):
                response = random.integers(vocabulary // 8, vocabulary // 2, count).tolist()
                shared = before if number else 0
                own = response if number else prompt + response
                predictors += [begin + before - 1, *range(len(ids) + len(own) - count, len(ids) + len(own) - 1)]
                positions += range(shared, shared + len(own))
                lengths.append(len(own))
                prompts.append((begin, shared))
                targets += response
                sequences.append((torch.tensor(prompt + response, device=device), before))
                ids += own
        tensors = (torch.tensor(values, device=device) for values in (ids, positions, predictors, targets))
        input_ids, places, predict, target = tensors
        factors = torch.from_numpy(random.choice([-1.0, 1.0], len(targets))).float().to(device)
        packing = Packing.of(lengths, prompts).to(device)
        return cls(input_ids, places, packing, predict, target, factors, tuple(sequences))


@dataclass(frozen=True)
class OwnLogprobs:
    """Results of the model alone, and how much one rounding of its embeddings changes."""

    logprobs: Tensor  # [R]
    norm: float
    rounding: float  # of a logprob, the largest
    norm_rounding: float  # as a share of the norm


def alone(model: Any, row: ProofRow) -> OwnLogprobs:
    """Return the results of the model alone for the sequences of the row.

    Leaves `model` with `IMPLEMENTATION` and in evaluation mode. Raises whatever the model raises.
    """
    model.set_attn_implementation(IMPLEMENTATION)
    model.eval()

    def score() -> Tensor:
        parts = []
        for ids, before in row.sequences:
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
            parts.append(logits[before - 1 : -1].log_softmax(-1).gather(-1, ids[before:, None]).squeeze(-1))
        return torch.cat(parts)

    logprobs, norm = _with_norm(model, row, score)
    unit = torch.finfo(model.dtype).eps
    signs = torch.Generator().manual_seed(0)

    def rounded(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * (1 + unit * (2 * torch.randint(0, 2, output.shape, generator=signs).to(output) - 1))

    handle = model.get_input_embeddings().register_forward_hook(rounded)
    try:
        moved, moved_norm = _with_norm(model, row, score)
    finally:
        handle.remove()
    return OwnLogprobs(logprobs, norm, float((moved - logprobs).abs().max()), abs(moved_norm - norm) / max(norm, 1e-30))


def compare(model: Any, score: Score, row: ProofRow, expected: OwnLogprobs) -> Proof:
    """Compare `score` of the row, in training mode, with what `alone` returned for the same parameters."""
    model.set_attn_implementation(NAME)
    model.train()
    packed, packed_norm = _with_norm(
        model, row, lambda: score(row.input_ids, row.positions, row.packing, row.predictors, row.targets)[0]
    )
    gap = float((packed - expected.logprobs).abs().max())
    gap = gap if math.isfinite(gap) else math.inf
    norm_gap = abs(packed_norm - expected.norm) / max(expected.norm, 1e-30)
    norm_gap = norm_gap if math.isfinite(norm_gap) else math.inf
    return Proof(gap, norm_gap, expected.rounding, expected.norm_rounding, str(model.dtype).removeprefix("torch."))


def _with_norm(model: nn.Module, row: ProofRow, score: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Return the logprobs that `score` computes, and the norm of the gradient of their weighted sum.

    Frees the gradient of a parameter as soon as it is known: all of them would need as much memory as the model.
    """
    squares: list[Tensor] = []

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        squares.append(parameter.grad.detach().double().square().sum())
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(take) for p in model.parameters() if p.requires_grad]
    try:
        logprobs = score()
        (logprobs * row.factors).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return logprobs.detach(), float(torch.stack(squares).sum().sqrt()) if squares else 0.0
