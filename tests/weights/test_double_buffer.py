"""The second copy of a model: loaded without touching the model, and swapped with it as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from services.weights.receivers.double_buffer import DoubleBuffer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # importing vLLM warns
CPU_MODEL = SimpleNamespace(enforce_eager=True, quantization=None, dtype=torch.float32)


class Model(torch.nn.Module):
    """Two layers of one tied weight, and another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(3, 2, bias=False).requires_grad_(False)
        self.head = torch.nn.Linear(3, 2, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = torch.nn.LayerNorm(3).requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load as vLLM's models do."""
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        tensors = dict(self.named_parameters())
        for name, weight in weights:
            getattr(tensors[name], "weight_loader", default_weight_loader)(tensors[name], weight)


def weights_of(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("embedding.weight", torch.full((2, 3), value)), ("norm.weight", torch.full((3,), value))]


def values(model: Model) -> list[float]:
    """Return the value of each tensor that `weights_of` names, all of whose elements must be equal."""
    assert model.head.weight is model.embedding.weight, "tied weights stay tied"
    return [float(tensor.unique().item()) for tensor in (model.embedding.weight, model.norm.weight)]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr("services.weights.receivers.double_buffer.LEAST_BYTES", (2 * 6 + 3) * 4)
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model()
    record_metadata_for_reloading(model)
    model.embedding.weight.fill_(0.0)
    model.norm.weight.fill_(0.0)
    return model


@pytest.fixture
def buffer(model: Model) -> DoubleBuffer:
    from services.weights.receivers.double_buffer import double_buffer

    buffer = double_buffer(model, CPU_MODEL)
    assert buffer is not None
    return buffer


def test_the_model_gets_new_weights_by_an_exchange_alone(model: Model, buffer: DoubleBuffer) -> None:
    for value in (1.0, 2.0, 3.0):
        weights = weights_of(value)
        buffer.fill(weights)
        assert values(model) == [value - 1] * 2
        assert buffer.exchange(weights)
        assert values(model) == [value] * 2
        assert not buffer.exchange(weights), "the copy has the older weights now"


def test_weights_of_an_abandoned_transfer_are_not_applied(model: Model, buffer: DoubleBuffer) -> None:
    wanted, late = weights_of(1.0), weights_of(2.0)
    buffer.fill(wanted)
    buffer.fill(late)
    assert not buffer.exchange(wanted)
    assert values(model) == [0.0, 0.0]


def test_weights_that_do_not_fit_leave_the_model_as_it_was(model: Model, buffer: DoubleBuffer) -> None:
    wrong = [("embedding.weight", torch.full((2, 3), 1.0)), ("norm.weight", torch.ones(4))]
    with pytest.raises((AssertionError, RuntimeError)):
        buffer.fill(wrong)
    assert not buffer.exchange(wrong)
    assert values(model) == [0.0, 0.0]
    weights = weights_of(5.0)
    buffer.fill(weights)
    assert buffer.exchange(weights)
    assert values(model) == [5.0, 5.0]


@pytest.mark.parametrize("other", ["compiled", "quantized", "derived", "elsewhere", "small"])
def test_other_models_are_reloaded_in_the_pause(model: Model, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.weights.receivers.double_buffer import double_buffer

    given: dict[str, Any] = vars(CPU_MODEL).copy()
    if other == "compiled":
        given["enforce_eager"] = False
    elif other == "quantized":
        given["quantization"] = "fp8"
    elif other == "derived":
        model.norm.process_weights_after_loading = lambda _: None  # type: ignore[assignment]
    elif other == "small":
        monkeypatch.setattr("services.weights.receivers.double_buffer.LEAST_BYTES", (2 * 6 + 3) * 4 + 1)
    else:
        model.to("meta")
    assert double_buffer(model, SimpleNamespace(**given)) is None
