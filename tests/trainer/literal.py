"""The formulas of docs/semantics.md, token by token, in float64: slow and obvious, with gradients by autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.config.loss import Loss


@dataclass(frozen=True)
class Response:
    """One response with n tokens in the loss; tensors are [n] float64."""

    theta: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    entropy: Tensor
    advantage: float
    weight: float = 1.0
    group: object = None


def objective(responses: Sequence[Response], config: Loss, from_behaviour: bool = False, constant: float = 1.0) -> Tensor:
    """Return the loss of a mini-batch of whole responses. `constant`: the divisor with that denominator."""
    zero = sum((response.theta.sum() * 0 for response in responses), torch.zeros((), dtype=torch.float64))
    sums, counts, groups = [], [], []
    for response in responses:
        places = [t for t in range(len(response.theta)) if math.isfinite(response.behaviour[t])]
        if places:
            sums.append(response.weight * sum(_tokens(response, places, config, from_behaviour), zero))
            counts.append(len(places))
            groups.append(response.group)
    if config.denominator == "constant":
        return sum(sums, zero) / constant
    if not counts:
        return zero
    if config.denominator == "token":
        return sum(sums, zero) / sum(counts)
    if config.denominator == "sequence":
        return sum((one / count for one, count in zip(sums, counts, strict=True)), zero) / len(counts)
    means = []
    for group in set(groups):
        members = [i for i in range(len(groups)) if groups[i] == group]
        means.append(sum((sums[i] for i in members), zero) / sum(counts[i] for i in members))
    return sum(means, zero) / len(means)


def _tokens(response: Response, places: list[int], config: Loss, from_behaviour: bool) -> list[Tensor]:
    """Return the loss of every counted token."""
    mu = [float(response.behaviour[t]) for t in places]
    theta = [response.theta[t] for t in places]
    old = mu if from_behaviour else [float(response.old[t]) for t in places]
    losses = _policy(theta, old, mu, response.advantage, config)
    corrected = [weight * loss for weight, loss in zip(_weights(old, mu, response.advantage, config), losses, strict=True)]
    for i, t in enumerate(places):
        if config.kl_beta > 0:
            corrected[i] = corrected[i] + config.kl_beta * _kl(theta[i], float(response.reference[t]))
        corrected[i] = corrected[i] - config.entropy_coefficient * response.entropy[t]
    return corrected


def _policy(theta: list[Tensor], old: list[float], mu: list[float], a: float, config: Loss) -> list[Tensor]:
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratios = [torch.exp(now - then) for now, then in zip(theta, old, strict=True)]
    match config.policy:
        case "grpo" | "dr_grpo":
            return [_surrogate(r, a, low, 1 + config.clip_low) for r in ratios]
        case "dapo":
            return [_surrogate(r, a, low, high) for r in ratios]
        case "gspo":
            s = torch.exp(sum((now - then for now, then in zip(theta, old, strict=True)), torch.zeros(())) / len(theta))
            return [_surrogate(s, a, low, high)] * len(theta)
        case "cispo":
            return [-a * min(r.item(), high) * now for r, now in zip(ratios, theta, strict=True)]
        case "reinforce":
            return [-a * min(max(r.item(), low), high) * now for r, now in zip(ratios, theta, strict=True)]
        case "dppo_tv" | "dppo_kl":
            return [_dppo(now, before, a, config) for now, before in zip(theta, mu, strict=True)]
    assert config.policy == "tests.trainer.losses.test_custom:half"
    return [-a * now / 2 for now in theta]


def _surrogate(ratio: Tensor, a: float, low: float, high: float) -> Tensor:
    return torch.maximum(-a * ratio, -a * torch.clamp(ratio, low, high))


def _dppo(theta: Tensor, mu: float, a: float, config: Loss) -> Tensor:
    p, q = math.exp(mu), math.exp(theta.item())
    tv, kl = abs(p - q), p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    away = (a > 0 and theta.item() > mu) or (a < 0 and theta.item() < mu)
    masked = away and (tv if config.policy == "dppo_tv" else kl) > config.clip_high
    return 0 * theta if masked else -a * torch.exp(theta - mu)


def _weights(old: list[float], mu: list[float], a: float, config: Loss) -> list[float]:
    ds = [min(max(o - m, -10.0), 10.0) for o, m in zip(old, mu, strict=True)]
    geometric_mean = math.exp(sum(ds) / len(ds))
    variation = sum(abs(math.exp(d) - 1) / 2 for d in ds) / len(ds)
    weights = []
    for d in ds:
        rho = math.exp(d)
        weight = min(rho, config.correction_upper)
        for kind, bounds in config.correction_mask.items():
            value = {"token": rho, "sequence": geometric_mean, "variation": variation}[kind]
            if kind == "variation":
                if value > bounds[0] and d * a > 0:
                    weight = 0.0
            elif not bounds[0] <= value <= bounds[1]:
                weight = 0.0
        weights.append(weight)
    return weights


def _kl(theta: Tensor, reference: float) -> Tensor:
    d = torch.clamp(theta - reference, -40, 40)
    return torch.exp(-d) - 1 + d
