"""Tokens for tests of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.config.loss import Loss
from services.trainer.losses import Tokens


def make_tokens(
    theta: Sequence[float],
    advantages: Sequence[float],
    old: Sequence[float] | None = None,
    behaviour: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    samples: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tokens:
    """Return the tokens of one response unless `samples` says otherwise; `old` defaults to theta, `behaviour` to `old`."""

    def tensor(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    logprobs = tensor(theta).requires_grad_()
    return Tokens(
        logprobs=logprobs,
        old=logprobs.detach() if old is None else tensor(old),
        behaviour=tensor(behaviour if behaviour is not None else old if old is not None else theta),
        reference=None if reference is None else tensor(reference),
        advantages=tensor(advantages),
        weights=tensor([1.0] * len(theta) if weights is None else weights),
        shares=torch.ones(len(theta), dtype=dtype),
        entropy=torch.zeros(len(theta), dtype=dtype),
        samples=torch.tensor([0] * len(theta) if samples is None else samples, dtype=torch.int64),
    )


def plain(**options: object) -> Loss:
    """Return a loss without KL, changed by `options`."""
    return Loss.model_validate({"kl_beta": 0.0} | options)
