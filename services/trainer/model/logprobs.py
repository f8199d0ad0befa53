"""Logprobs and entropy of response tokens, from hidden states and the output matrix.

Guarantees: logits exist for `chunk` tokens at a time, in forward and in backward, never for a whole row; log-softmax is float32
whatever the dtype of the weights; memory in addition to the inputs is O(chunk * vocabulary), plus a float32 copy of the matrix if
the product is requested in float32. With `keep`, backward finds the products in half precision instead of computing them again,
which takes a quarter of the time of the output layer and 2 bytes x vocabulary for each token of a row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LogitRule:
    """What a model does to its logits after the output matrix: first `scale`, then cap x tanh(logit / cap), as Gemma 2."""

    scale: float = 1.0
    cap: float | None = None


PLAIN = LogitRule()
"""The rule of most models: logits stay as they are."""


class _TokenLogprobs(torch.autograd.Function):
    """Keeps hidden states and the per-token log-normaliser. Backward computes logits again, unless they are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        fp32: bool,
        rule: LogitRule,
        compiled: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        matrix = weight.float() if fp32 else weight
        score = compiled_chunks()[0] if compiled else _scored
        keep = keep and matrix.dtype != torch.float32 and any(ctx.needs_input_grad)  # float32 logits are computed in place
        products: list[Tensor] = []
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            product = _product(hidden[part], matrix) if keep else None
            logprobs[part], entropy[part], normaliser[part] = score(
                hidden[part], matrix, bias, targets[part], temperature, rule, product
            )
            if product is not None:
                products.append(product)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature, ctx.chunk, ctx.fp32, ctx.rule, ctx.compiled = temperature, chunk, fp32, rule, compiled
        ctx.products = products
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """d logprob / d logit = onehot - p; d entropy / d logit = -p (log p + entropy); both over temperature."""
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        for_logprobs, for_entropy = gradients
        for_logprobs = torch.zeros_like(normaliser) if for_logprobs is None else for_logprobs
        hidden_gradient = torch.empty_like(hidden)
        matrix = weight.float() if ctx.fp32 else weight
        weight_gradient = bias_gradient = None  # stay None for a frozen matrix
        if ctx.needs_input_grad[1]:
            # float32, so that the sum over chunks does not depend on the number of chunks when weights are bfloat16
            weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        if ctx.needs_input_grad[2]:
            bias_gradient = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        differentiate = compiled_chunks()[1] if ctx.compiled else _differentiated
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            gradient, for_bias = differentiate(
                hidden[part],
                matrix,
                bias,
                targets[part],
                ctx.temperature,
                ctx.rule,
                normaliser[part],
                entropy[part],
                for_logprobs[part],
                None if for_entropy is None else for_entropy[part],
                bias_gradient is not None,
                ctx.products.pop(0) if ctx.products else None,
            )
            if bias_gradient is not None and for_bias is not None:
                bias_gradient += for_bias
            hidden_gradient[part] = (gradient @ matrix).to(hidden.dtype)
            if weight_gradient is None:
                continue
            _add_product(weight_gradient, gradient.T, hidden[part])
        whole = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return hidden_gradient, whole, None if bias_gradient is None else bias_gradient.to(bias.dtype), *[None] * 7


def _scored(
    hidden: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    rule: LogitRule,
    product: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs, entropy and log-normaliser of a chunk, [c] each."""
    logits = _logits(hidden, matrix, bias, rule, product).div_(temperature)
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    logits -= normaliser[:, None]
    return logprobs, -(logits.exp() * logits).sum(-1), normaliser


def _differentiated(
    hidden: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    rule: LogitRule,
    normaliser: Tensor,
    entropy: Tensor,
    for_logprobs: Tensor,
    for_entropy: Tensor | None,
    with_bias: bool,
    product: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of a chunk's product, [c, V] in the matrix's dtype, and of the bias, [V], if wanted."""
    logits = _logits(hidden, matrix, bias, rule, product)
    slope = None if rule.cap is None else 1 - (logits / rule.cap).square()  # of the cap
    gradient = _logit_gradient(logits.div_(temperature).sub_(normaliser[:, None]), entropy, for_logprobs, for_entropy)
    if torch.compiler.is_compiling():  # joins the same pass over [c, V]; scattering needs the whole gradient in memory first
        places = torch.arange(gradient.shape[1], device=gradient.device)
        gradient = gradient + torch.where(places == targets[:, None], for_logprobs[:, None], 0.0)
    else:
        gradient.scatter_add_(-1, targets[:, None], for_logprobs[:, None])
    gradient = gradient.div_(temperature)
    if slope is not None:
        gradient.mul_(slope)
    for_bias = gradient.sum(0) * rule.scale if with_bias else None
    return gradient.mul_(rule.scale).to(matrix.dtype), for_bias


@functools.cache
def compiled_chunks() -> tuple[Any, Any]:
    """Return `_scored` and `_differentiated` compiled: their passes over [c, V] become one or two."""
    return torch.compile(_scored), torch.compile(_differentiated)


def _logit_gradient(log_p: Tensor, entropy: Tensor, for_logprobs: Tensor, for_entropy: Tensor | None) -> Tensor:
    """Return the gradient of logits [c, V], without the part of the targets, in the memory of `log_p`.

    In place, and with the entropy's part only if it has a gradient: passes over [c, V] cost as much as the products.
    """
    if for_entropy is None:
        return log_p.exp_().mul_(-for_logprobs[:, None])
    p = log_p.exp()
    return p.mul_(log_p.add_(entropy[:, None]).mul_(for_entropy[:, None]).add_(for_logprobs[:, None])).neg_()


def _add_product(to: Tensor, one: Tensor, two: Tensor) -> None:
    """Add a product, [V, H], to a float32 tensor, where possible without computing it apart."""
    if one.dtype == torch.float32:
        to.addmm_(one, two.float())
    elif to.is_cuda:  # the kernel adds up in float32, and need not round
        torch.addmm(to, one, two, out_dtype=torch.float32, out=to)
    else:
        to += one @ two


def _product(hidden: Tensor, matrix: Tensor) -> Tensor:
    """Return the product of a chunk, [c, V] in the matrix's dtype."""
    return hidden.to(matrix.dtype) @ matrix.T


def _logits(hidden: Tensor, matrix: Tensor, bias: Tensor | None, rule: LogitRule, product: Tensor | None) -> Tensor:
    """Return logits, [c, V] float32, as a new tensor that the caller may change. `product`: what is kept of it."""
    logits = (_product(hidden, matrix) if product is None else product).float()
    if bias is not None:
        logits += bias
    if rule.scale != 1:
        logits *= rule.scale
    return logits if rule.cap is None else logits.div_(rule.cap).tanh_().mul_(rule.cap)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    fp32: bool = False,
    bias: Tensor | None = None,
    rule: LogitRule = PLAIN,
    compiled: bool = False,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each target and the entropy of its distribution at `temperature`, two [R] float32.

    hidden [R, H] predicts targets [R] int64; weight [V, H], bias [V]. Both results are differentiable. With `fp32`, logits are a
    float32 product of bfloat16 states and weights, for which the matrix is copied once in forward and once in backward.
    """
    keep = keep and torch.is_grad_enabled()  # inside `forward` it is not, and inputs need a gradient in any case
    return _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, chunk, fp32, rule, compiled, keep)  # pyright: ignore[reportReturnType]


class LogprobHead(nn.Linear):
    """An output layer that returns logprobs instead of logits. It takes over the parameters, tied or not.

    Because it is a module that is called once per row, ZeRO-3 gathers the matrix once per row, whatever the number of chunks.
    """

    def __init__(self, head: nn.Linear, fp32: bool, rule: LogitRule = PLAIN, keep: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight, self.bias = head.weight, head.bias
        self.fp32, self.rule, self.keep = fp32, rule, keep
        self.compiled = False

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Compute `token_logprobs` with this layer."""
        return token_logprobs(
            hidden, self.weight, targets, temperature, chunk, self.fp32, self.bias, self.rule, self.compiled, self.keep
        )
