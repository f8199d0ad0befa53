"""Logprobs and entropy of response tokens from hidden states and the output matrix.

Guarantees: logits exist for `chunk` tokens at a time, in forward and in backward, never for a whole row; log-softmax is
float32 whatever the weights are; memory beside the inputs is O(chunk * vocabulary).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _TokenLogprobs(torch.autograd.Function):
    """Keeps only hidden states and the per-token log-normaliser; backward makes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, temperature)
            normaliser[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normaliser[part]
            logits -= normaliser[part, None]
            entropy[part] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """d logprob / d logit = onehot - p; d entropy / d logit = -p (log p + entropy); both over temperature."""
        for_logprobs, for_entropy = gradients
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        # float32, so that the sum over chunks does not depend on how many there are when weights are bfloat16
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _logits(hidden[part], weight, ctx.temperature).sub_(normaliser[part, None])
            p = log_p.exp()
            gradient = -p * (for_logprobs[part, None] + for_entropy[part, None] * (log_p + entropy[part, None]))
            gradient.scatter_add_(-1, targets[part, None], for_logprobs[part, None])
            gradient = (gradient / ctx.temperature).to(weight.dtype)
            hidden_gradient[part] = gradient @ weight
            weight_gradient += gradient.T @ hidden[part]
        return hidden_gradient, weight_gradient.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[c, V] float32, a tensor of its own that the caller may change."""
    return (
        (hidden @ weight.T).float().div_(temperature) if hidden.dtype != torch.float32 else (hidden @ weight.T).div_(temperature)
    )


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of its distribution at `temperature`, two [R] float32.

    hidden [R, H] predicts targets [R] int64; weight [V, H]. Both results are differentiable.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk)  # pyright: ignore[reportReturnType]


class LogprobHead(nn.Linear):
    """An output matrix that returns logprobs instead of logits. It takes over the parameter, tied or not.

    Being a module, its one call per row is where ZeRO-3 gathers the matrix, whatever the number of chunks.
    """

    def __init__(self, head: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight = head.weight
        self.bias = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """As `token_logprobs`."""
        return token_logprobs(hidden, self.weight, targets, temperature, chunk)
