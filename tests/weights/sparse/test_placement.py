"""Changes written into a model with fused, sharded and padded weights give the same bits as a reload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.weights.sparse.changes import bits, changed_positions
from services.weights.sparse.placement import NotPlaceable, trace
from tests.support.models.fused_model import FusedModel, checkpoint, manifest_of
from tests.support.versions import assert_same_bits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def changed(weights: dict[str, torch.Tensor], seed: int, share: float) -> dict[str, torch.Tensor]:
    """Return weights of which a share has different, arbitrary bits."""
    random = torch.Generator().manual_seed(seed)
    found = {name: weight.clone() for name, weight in weights.items()}
    for name, weight in found.items():
        held = bits(weight)
        mask = torch.rand(held.shape, generator=random) < share
        most = 2 ** (8 * weight.element_size() - 1) - 1
        other = torch.randint(-most - 1, most, held.shape, generator=random, dtype=held.dtype)
        if name == "head" and weight.element_size() == 2:
            other &= ~0x0480  # no NaN, as its conversion to float32 depends on the instruction
        held[mask] = other[mask]
    return found


def raw(elements: torch.Tensor) -> torch.Tensor:
    return elements.contiguous().view(torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from((0.0, 0.01, 0.3, 1.0)), st.sampled_from((1, 2, 4)), st.sampled_from(DTYPES))
def test_changes_are_written_where_a_reload_puts_them(seed: int, share: float, ranks: int, dtype: torch.dtype) -> None:
    old = checkpoint(seed, dtype)
    new = changed(old, seed, share)
    manifest = manifest_of(old)
    for rank in range(ranks):
        model, reloaded = FusedModel(rank, ranks, dtype), FusedModel(rank, ranks, dtype)
        model.load_weights(old.items())
        reloaded.load_weights(new.items())
        before = model.state()
        placement = trace(model, manifest.tensors, manifest.aliases)
        assert_same_bits(model.state(), before)
        writes = []
        for index, meta in enumerate(manifest.tensors):
            is_now, was = bits(new[meta.name]), bits(old[meta.name])
            positions = changed_positions(is_now, was)
            found, right = placement.find(index, positions, raw(was[positions]), raw(is_now[positions]))
            assert all(right)
            writes += found
        assert_same_bits(model.state(), before)
        for each in writes:
            each.write()
        assert_same_bits(model.state(), reloaded.state())
        assert all(each.written() for each in writes)


@pytest.mark.parametrize("name", ["embed", "k", "o", "turned", "head", "experts", "counts"])
def test_an_unexpected_element_is_detected(name: str) -> None:
    old = checkpoint()
    manifest, model = manifest_of(old), FusedModel(1, 2)
    model.load_weights(old.items())
    placement = trace(model, manifest.tensors, manifest.aliases)
    index = [meta.name for meta in manifest.tensors].index(name)
    positions = torch.arange(old[name].numel())
    right = bits(old[name])
    assert all(placement.find(index, positions, raw(right), raw(right))[1])
    wrong = right.clone()
    wrong[-1] ^= 1 << 6
    assert not all(placement.find(index, positions, raw(wrong), raw(wrong))[1]), "the last element is on the last rank"


class Loading(FusedModel):
    """A model whose loader for `norm` is replaced."""

    def __init__(self, load: Any) -> None:
        super().__init__()
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "norm":
                self._load(self.norm, weight)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda held, given: held.data.copy_(given + 1), "computed"),
        (lambda held, given: held.data.copy_(given.float()), "computed"),
        (lambda held, given: held.data.add_(1), "add_"),
        (lambda held, given: held.data.fill_(1), "fill_"),
        (lambda held, given: held.data.copy_(torch.ones(24)), "computed"),
        (lambda held, given: held.data.copy_(given[:1].expand(24)), "twice"),
        (lambda held, given: held.data.fill_(given[0].item()), "more than copy"),
        (lambda held, given: held.absent.copy_(given), "AttributeError"),
        (lambda held, given: torch.zeros(24, dtype=held.dtype).copy_(given), "more than copy"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_rejected(load: Any, reason: str) -> None:
    model, manifest = Loading(load), manifest_of(checkpoint())
    before = model.state()
    with pytest.raises(NotPlaceable, match=reason):
        trace(model, manifest.tensors, manifest.aliases)
    assert_same_bits(model.state(), before)


def test_a_model_in_a_narrower_type_is_rejected() -> None:
    manifest = manifest_of(checkpoint(dtype=torch.float32))
    with pytest.raises(NotPlaceable, match=r"converts torch\.float32 to torch\.bfloat16"):
        trace(FusedModel(), manifest.tensors, manifest.aliases)
