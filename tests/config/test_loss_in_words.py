"""At the start, a run describes its effective loss in words that agree with the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.config.loss_in_words import clips, loss_in_words
from services.trainer import losses
from tests.support.models.tiny_model import make_config
from tests.trainer.losses.tokens import make_tokens

BUILT_IN = ("grpo", "dapo", "cispo", "gspo", "reinforce")


def _words(**sections: Any) -> str:
    return " ".join(loss_in_words(make_config(Path("m"), **sections)))


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_ratio_of_one_is_stated_and_makes_all_losses_equal(policy: str) -> None:
    words = _words(loss={"policy": policy, "correction_upper": 3.0, "denominator": "sequence"})
    assert "The ratio is exactly 1" in words
    assert f'loss.policy = "{policy}" is that of -A log p' in words
    assert "leave the keys of the correction at their defaults" in words
    gradients = []
    for name in ("reinforce", policy):
        config = make_config(Path("m"), loss={"policy": name, "kl_beta": 0.0}).loss
        tokens = make_tokens([-1.0, -2.0, -0.5], [1.0, 1.0, -2.0], behaviour=[-1.0, -2.0, -0.5], samples=[0, 0, 1])
        loss = losses.compute(tokens, config, 1.0).loss
        gradients.append(torch.autograd.grad(loss, tokens.logprobs)[0])
    torch.testing.assert_close(*gradients)


def test_the_reference_of_the_ratio_is_stated() -> None:
    assert "to the policy that sampled the token" in _words(loss={"policy": "dapo"})
    assert "to the policy that sampled the token" in _words(loss={"policy": "dppo_tv"}, admission={"max_staleness": 0})
    words = _words(loss={"policy": "dapo"}, trainer={"mini_batches": 4})
    assert "to the policy at the start of the step, over 4 mini-batches" in words
    words = _words(loss={"policy": "dapo"}, admission={"max_staleness": 0})
    assert "The ratio is exactly 1" in words
    assert "stale" not in words


@pytest.mark.parametrize(("policy", "denominator", "said"), [("grpo", "token", True), ("grpo", "sequence", False),
                                                             ("gspo", "token", True), ("gspo", "sequence", False),
                                                             ("dapo", "token", False)])  # fmt: skip
def test_a_mean_that_differs_from_the_paper_is_stated(policy: str, denominator: str, said: bool) -> None:
    assert ("whereas the" in _words(loss={"policy": policy, "denominator": denominator})) == said


def test_clip_bounds_that_differ_from_the_paper_are_stated() -> None:
    assert "whereas the" not in _words(loss={"policy": "gspo"})
    words = _words(loss={"policy": "gspo", "clip_low": 0.2})
    assert "loss.clip_low = 0.2, whereas the GSPO paper has 0.0003." in words
    assert "loss.clip_high" not in words


@pytest.mark.parametrize(
    ("loss", "mini_batches", "active"),
    [
        ({"policy": "dapo", "correction_upper": 3.0}, 1, False),
        ({"policy": "dapo", "correction_upper": 3.0}, 2, True),
        ({"policy": "dapo"}, 1, True),
        ({"policy": "dppo_kl"}, 1, True),
        ({"policy": "mine.losses:own", "correction_upper": 3.0}, 1, True),
    ],
)
def test_clip_bounds_act_only_on_changing_ratios(loss: dict[str, Any], mini_batches: int, active: bool) -> None:
    assert clips(make_config(Path("m"), loss=loss), mini_batches) == active
