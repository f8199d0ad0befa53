"""Custom policy losses are loaded, checked and used like the built-in ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.config import ConfigError
from services.config.loss import POLICIES, Loss
from services.trainer import losses
from services.trainer.losses.policies import PolicyTerm, Tokens, check
from tests.trainer.losses.tokens import make_tokens, plain

HERE = "tests.trainer.losses.test_custom"


def half(tokens: Tokens, config: Loss) -> PolicyTerm:
    """Compute half of REINFORCE, with its own clip from the configuration."""
    never = torch.zeros_like(tokens.advantages, dtype=torch.bool)
    return PolicyTerm(-tokens.advantages * tokens.logprobs / 2, never, tokens.ratio() > 1 + config.clip_high)


def _with(**changes: object) -> PolicyTerm:
    never = torch.zeros(3, dtype=torch.bool)
    return PolicyTerm(**({"loss": torch.zeros(3, requires_grad=True), "clipped_low": never, "clipped_high": never} | changes))  # pyright: ignore[reportArgumentType]


def number(tokens: Tokens, config: Loss) -> float:
    return 1.0


def summed(tokens: Tokens, config: Loss) -> PolicyTerm:
    return _with(loss=tokens.logprobs.sum())


def detached(tokens: Tokens, config: Loss) -> PolicyTerm:
    return _with(loss=tokens.logprobs.detach())


def infinite(tokens: Tokens, config: Loss) -> PolicyTerm:
    return _with(loss=tokens.logprobs / 0)


def float_flags(tokens: Tokens, config: Loss) -> PolicyTerm:
    return _with(clipped_low=torch.zeros(3))


def no_flags(tokens: Tokens, config: Loss) -> PolicyTerm:
    return _with(clipped_low=None)


def one_argument(tokens: Tokens) -> PolicyTerm:
    return _with()


def test_a_custom_loss_is_checked_corrected_and_measured() -> None:
    config = plain(policy=f"{HERE}:half", clip_high=0.5)
    check(config)
    tokens = make_tokens([-1.0, -1.0], [2.0, 2.0], old=[-1.0, -2.0], behaviour=[-1.0, -20.0])
    output = losses.compute(tokens, config, 4.0)
    assert output.loss.item() == pytest.approx((1 + 2) / 4), "the second is weighted by 2"
    assert output.sums["clip_high"].item() == 1
    assert output.learning.tolist() == [True, False]


@pytest.mark.parametrize("policy", POLICIES)
def test_built_in_losses_pass_the_check(policy: str) -> None:
    check(Loss(policy=policy))  # raises otherwise


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("number", r"must return a PolicyTerm of tensors \[R\], fix it: it returns float"),
        ("summed", r"for three tokens, `loss` is \(\)"),
        ("detached", "its loss carries no gradient of the logprobs"),
        ("infinite", r"its loss is \[-inf, -inf, -inf\]"),
        ("float_flags", r"`clipped_low` is torch.float32, not bool"),
        ("no_flags", "`clipped_low` is None"),
        ("one_argument", "fails on three test tokens, fix it: TypeError"),
        ("missing", "cannot be loaded .AttributeError: .*: fix the name or the module"),
    ],
)
def test_an_invalid_policy_loss_is_rejected_by_name(name: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=f"loss.policy = '{HERE}:{name}' .*{fault}|loss.policy = '{HERE}:{name}' {fault}"):
        check(Loss(policy=f"{HERE}:{name}"))


def test_a_module_that_raises_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_policy_loss.py").write_text("raise RuntimeError('out of paper')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(RuntimeError: out of paper\)"):
        check(Loss(policy="broken_policy_loss:f"))
    with pytest.raises(ConfigError, match="No module named 'nowhere_at_all'"):
        check(Loss(policy="nowhere_at_all:f"))
