"""From the start of a row to the end of its backward pass, the host waits for no result of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.config.loss import POLICIES, Loss
from services.trainer import losses
from services.trainer.losses import Tokens
from services.trainer.model import policy_network
from services.trainer.step import batches, denominators
from services.trainer.step.gradient import GradientSum
from services.trainer.step.metrics import Clock, StepMetrics
from tests.support.models.tiny_model import VOCABULARY, make_config, make_payloads, make_samples, plan_of
from tests.trainer.no_waiting import Waited, no_waiting

CPU = torch.device("cpu")
OPTIONS: dict[str, dict[str, Any]] = {
    "from the start": {},
    "from behaviour": {},
    "masks": {"correction_mask": {"token": [0.5, 2.0], "sequence": [0.9, 1.1], "variation": [0.1]}},
    "kl": {"kl_beta": 0.1},
    "entropy": {"entropy_coefficient": 0.01},
}
PAIRS = [
    (policy, list(OPTIONS)[(place + shift) % len(OPTIONS)], unknown)
    for place, policy in enumerate(POLICIES) for shift, unknown in ((0, ()), (2, (1, 4)))
]  # fmt: skip
"""Each policy loss without and with unknown behaviour logprobs, and with two of the options, each of which occurs."""

X, MASK, COUNTS = torch.arange(4.0), torch.tensor([True, False, True, True]), torch.tensor([1, 2, 1, 0])
WAITING: list[Callable[[], Any]] = [
    lambda: X[MASK], lambda: X.clone().index_put_((MASK,), torch.zeros(3)), lambda: float(X.sum()), lambda: bool(MASK.any()),
    lambda: X.tolist(), lambda: X.cpu(), lambda: torch.bincount(COUNTS), lambda: X.unique(), lambda: X.masked_select(MASK),
    lambda: MASK.nonzero(), lambda: torch.where(MASK), lambda: torch.repeat_interleave(X, COUNTS), lambda: torch.tensor([1.0]),
]  # fmt: skip
"""What the tests below would miss if it were not noticed."""


def test_operations_that_wait_are_noticed() -> None:
    for call in WAITING:
        with pytest.raises(Waited), no_waiting():
            call()


def test_the_backward_pass_of_a_mask_is_noticed() -> None:
    leaf = X.clone().requires_grad_()
    total = leaf[MASK].sum()
    with pytest.raises(Waited), no_waiting():
        total.backward()


@pytest.mark.parametrize(("policy", "options", "unknown"), PAIRS)
def test_the_loss_waits_for_nothing(policy: str, options: str, unknown: tuple[int, ...]) -> None:
    config, mu = Loss(policy=policy, **OPTIONS[options]), options == "from behaviour"
    tokens = _tokens(unknown)
    places, metrics = losses.counted_places(tokens.behaviour), StepMetrics(CPU, True, True, True)
    expected = losses.compute(replace(tokens, responses=None), config, 3.0, from_behaviour=mu)  # as if only the device knew
    (slope,) = torch.autograd.grad(expected.loss, tokens.logprobs)
    with no_waiting():
        output = losses.compute(tokens, config, 3.0, places, mu)
        metrics.add(output.sums, output.maxima)
        output.loss.backward()
    assert tokens.logprobs.grad is not None
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(tokens.logprobs.grad, slope)
    assert torch.equal(output.learning, expected.learning)
    assert all(torch.equal(output.sums[name], value) for name, value in expected.sums.items())
    assert output.sums["tokens"].item() == len(tokens.samples) - len(unknown)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("unknown", [0, 3])
def test_a_row_is_scored_and_differentiated_without_waiting(tiny_model: Path, options: str, unknown: int) -> None:
    staleness = int(options == "from behaviour")
    loss = {"policy": "gspo", "kl_beta": 0.0, **OPTIONS[options]}
    config = make_config(tiny_model, loss=loss, admission={"max_staleness": staleness})
    payloads = make_payloads(groups=2, size=4)
    for payload in payloads.values():
        payload.logprobs[:unknown] = float("nan")
    _, (plan,) = plan_of([[[list(range(8))]]], make_samples(payloads))
    (row,) = batches.build(plan, payloads, vocabulary=VOCABULARY, row_tokens=256)
    assert len(row.counted) == len(row.targets) - 2 * unknown
    scorer = policy_network.load(config.model, 0.7, 16)
    engine, world = _Engine(scorer), SimpleNamespace(device=CPU, size=1)
    reference = SimpleNamespace(module=scorer) if config.loss.kl_beta > 0 else None
    sums = GradientSum(config, engine, reference, world, leads=True)  # pyright: ignore[reportArgumentType]
    (shares,) = denominators.shares([row], denominators.count_tokens([row]), "sequence")
    metrics, clock, old = StepMetrics(CPU, True, True, True), Clock(CPU), row.behaviour.nan_to_num(-4.0)

    def add() -> Tensor:
        return sums.add(row, old, shares, 7.0, True, True, metrics, clock).learning

    first = add()  # what is cached per device is made by the first row
    with no_waiting():
        second = add()
    assert torch.equal(first, second)
    assert len(first) == len(row.targets)
    assert set(clock.seconds) == {"forward", "backward"} | ({"reference"} if reference else set())


class _Engine:
    """Stands in for DeepSpeed's engine of one rank."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.training = module, True

    def __call__(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def train(self, mode: bool) -> None:
        self.training = mode

    def set_gradient_accumulation_boundary(self, boundary: bool) -> None:
        pass

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def _tokens(unknown: tuple[int, ...]) -> Tokens:
    """Return tokens of three responses, those in `unknown` without a behaviour logprob."""
    generator = torch.Generator().manual_seed(5)
    theta, old, behaviour, reference, advantages, entropy = torch.randn(6, 9, generator=generator) / 3
    behaviour[list(unknown)] = float("nan")
    ones, samples = torch.ones(9), torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2])
    return Tokens(
        (theta - 1).requires_grad_(), old - 1, behaviour - 1, reference - 1, advantages, ones, ones,
        entropy.requires_grad_(), samples, responses=4,
    )  # fmt: skip
