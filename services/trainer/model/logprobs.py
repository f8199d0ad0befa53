"""Logprobs and entropy of response tokens, from hidden states and the output matrix.

Guarantees: logits exist for `chunk` tokens at a time, in forward and in backward, never for a whole row; log-softmax is float32
whatever the dtype of the weights; memory in addition to the inputs is O(chunk * vocabulary), plus a float32 copy of the matrix if
the product is requested in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _TokenLogprobs(torch.autograd.Function):
    """Keeps only hidden states and the per-token log-normaliser; backward recomputes the logits of each chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, fp32: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        matrix = weight.float() if fp32 else weight
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], matrix, temperature)
            normaliser[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normaliser[part]
            logits -= normaliser[part, None]
            entropy[part] = -(logits.exp() * logits).sum(-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.temperature, ctx.chunk, ctx.fp32 = temperature, chunk, fp32
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        """d logprob / d logit = onehot - p; d entropy / d logit = -p (log p + entropy); both over temperature."""
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        for_logprobs, for_entropy = gradients
        for_logprobs = torch.zeros_like(normaliser) if for_logprobs is None else for_logprobs
        hidden_gradient = torch.empty_like(hidden)
        matrix = weight.float() if ctx.fp32 else weight
        weight_gradient: Tensor | None = None  # stays None for a frozen matrix
        if ctx.needs_input_grad[1]:
            # float32, so that the sum over chunks does not depend on the number of chunks when weights are bfloat16
            weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _logits(hidden[part], matrix, ctx.temperature).sub_(normaliser[part, None])
            # In place, and with the entropy's part only if it has a gradient: passes over [c, V] cost as much as the products.
            if for_entropy is None:
                gradient = log_p.exp_().mul_(-for_logprobs[part, None])
            else:
                p = log_p.exp()
                gradient = p.mul_(
                    log_p.add_(entropy[part, None]).mul_(for_entropy[part, None]).add_(for_logprobs[part, None])
                ).neg_()
            gradient.scatter_add_(-1, targets[part, None], for_logprobs[part, None])
            gradient = gradient.div_(ctx.temperature).to(matrix.dtype)
            hidden_gradient[part] = (gradient @ matrix).to(hidden.dtype)
            if weight_gradient is None:
                continue
            if matrix.dtype == torch.float32:
                weight_gradient.addmm_(gradient.T, hidden[part].float())  # avoids a second [V, H]
            else:
                weight_gradient += gradient.T @ hidden[part]
        whole = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return hidden_gradient, whole, None, None, None, None


def _logits(hidden: Tensor, matrix: Tensor, temperature: float) -> Tensor:
    """Return logits, [c, V] float32, as a new tensor that the caller may change; the product has the matrix's dtype."""
    return (hidden.to(matrix.dtype) @ matrix.T).float().div_(temperature)


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, fp32: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each target and the entropy of its distribution at `temperature`, two [R] float32.

    hidden [R, H] predicts targets [R] int64; weight [V, H]. Both results are differentiable. With `fp32`, logits are a float32
    product of bfloat16 states and weights, for which the matrix is copied once in forward and once in backward.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk, fp32)  # pyright: ignore[reportReturnType]


class LogprobHead(nn.Linear):
    """An output matrix that returns logprobs instead of logits. It takes over the parameter, tied or not.

    Because it is a module that is called once per row, ZeRO-3 gathers the matrix once per row, whatever the number of chunks.
    """

    def __init__(self, head: nn.Linear, fp32: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight = head.weight
        self.bias = None
        self.fp32 = fp32

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Compute `token_logprobs` with this matrix."""
        return token_logprobs(hidden, self.weight, targets, temperature, chunk, self.fp32)
