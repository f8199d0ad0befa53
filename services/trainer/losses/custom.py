"""Policy losses by name, including the user's own.

`loss.policy = "package.module:function"` names a function of (`Tokens`, `Loss`) that returns a `PolicyTerm`; correction, KL,
entropy bonus, importance weights and denominator are applied to what it returns.

Guarantees: a function that cannot be loaded, or that returns the wrong type or shape for three tokens, is a `ConfigError` that
names `loss.policy`.
"""

from __future__ import annotations

import importlib
from functools import cache

import torch

from services.config import ConfigError
from services.config.loss import POLICIES, Loss
from services.trainer.losses.policies import POLICY_LOSSES, PolicyLoss
from services.trainer.losses.tokens import PolicyTerm, Tokens


@cache
def find(name: str) -> PolicyLoss:
    """Return the policy loss that `loss.policy` names. Raises `ConfigError`."""
    if name in POLICIES:
        return POLICY_LOSSES[name]
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(f"loss.policy = {name!r} cannot be loaded ({_line(error)}): fix the name or the module") from error


def check(config: Loss) -> None:
    """Load the policy loss and try it on three tokens of two responses. Raises `ConfigError`."""
    policy = find(config.policy)
    logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    frozen, ones = logprobs.detach(), torch.ones(3)
    tokens = Tokens(logprobs, frozen, frozen, frozen, torch.tensor([1.0, 1.0, -1.0]), ones, ones, ones, torch.tensor([0, 0, 1]))
    try:
        term = policy(tokens, config)
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(f"loss.policy = {config.policy!r} fails on three test tokens, fix it: {_line(error)}") from error
    if fault := _fault(term):
        raise ConfigError(f"loss.policy = {config.policy!r} must return a PolicyTerm of tensors [R], fix it: {fault}")


def _fault(term: object) -> str:
    """Return what is wrong with the result for three tokens, or an empty string."""
    if not isinstance(term, PolicyTerm):
        return f"it returns {type(term).__name__}"
    for name in ("loss", "clipped_low", "clipped_high"):
        value = getattr(term, name)
        if not isinstance(value, torch.Tensor) or value.shape != (3,):
            return f"for three tokens, `{name}` is {tuple(value.shape) if isinstance(value, torch.Tensor) else value!r}"
        if name != "loss" and value.dtype != torch.bool:
            return f"`{name}` is {value.dtype}, not bool"
    if not term.loss.isfinite().all():
        return f"its loss is {term.loss.tolist()}"
    return "" if term.loss.requires_grad else "its loss carries no gradient of the logprobs"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
