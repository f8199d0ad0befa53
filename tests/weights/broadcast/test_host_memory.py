"""Weights in host memory: their layout, and which of them are sent without a copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.weights.broadcast.host_memory import HostBuckets, as_they_lie, lay_end_to_end
from services.weights.buckets import Bucket, describe, plan_buckets
from tests.support.models.rank_worker import launch
from tests.support.models.tiny_model import make_payloads, make_samples


class Odd(torch.nn.Module):
    """Tensors of unaligned sizes and two types, one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(7, 3))
        self.b = torch.nn.Parameter(torch.randn(5).bfloat16())
        self.c = torch.nn.Parameter(torch.randn(64, 16))
        self.tied = self.a
        self.empty = torch.nn.Parameter(torch.randn(0, 4))


def bucket(tensors: dict[str, torch.Tensor]) -> Bucket:
    [whole] = plan_buckets([describe(name, tensor) for name, tensor in tensors.items()], 1 << 20).buckets
    return whole


def sent(given: dict[str, torch.Tensor], fleeting: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the memory of a bucket of these weights, and the weights that a receiver finds in it."""
    whole = bucket(given)
    memory = HostBuckets(1, fleeting).memory(0, whole, list(given.values()))
    assert memory.dtype == torch.uint8
    assert len(memory) == whole.nbytes
    return memory, dict(whole.views(memory))


def test_a_contiguous_model_is_unchanged_and_sent_in_place() -> None:
    model = Odd()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    lay_end_to_end(model)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    both = dict(model.named_parameters(remove_duplicate=False))
    assert both["tied"].data_ptr() == both["a"].data_ptr()
    assert [weight.dtype for weight in weights.values()] == [weight.dtype for weight in before.values()]
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert all(weight.data_ptr() % 64 == 0 for weight in weights.values()), "as fast as in separate memory"
    del weights["empty"]  # has no memory
    memory, found = sent(weights)
    assert memory.data_ptr() == model.a.data_ptr(), "nothing is copied"
    with torch.no_grad():
        model.c += 1
    assert torch.equal(found["c"], model.c)


def test_other_layouts_are_copied() -> None:
    model = Odd()
    lay_end_to_end(model)
    laid = {name: weight.detach() for name, weight in model.named_parameters()}
    a, b, c = laid["a"], laid["b"], laid["c"]
    alone = torch.randn(4, 4)
    for given in (
        laid,  # including an empty one
        {"b": b, "a": a},
        {"a": a, "c": c},
        {"a": a, "alone": alone},
        {"c": c, "again": c},
        {"t": alone.t()},
    ):
        memory, found = sent(given)
        assert memory.data_ptr() not in {tensor.data_ptr() for tensor in given.values()}
        assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    memory, found = sent({"a": a, "b": b}, fleeting=True)
    assert memory.data_ptr() != a.data_ptr(), "it may be gone when the next bucket is requested"
    assert torch.equal(found["b"], b)


def test_buffers_are_reused_in_turn() -> None:
    tensors = [torch.randn(3, size) for size in (6, 5, 4)]
    buckets = HostBuckets(2, True)
    first, second = (buckets.memory(i, bucket({"x": tensors[i]}), [tensors[i]]) for i in range(2))
    kept = second.clone()
    third = buckets.memory(2, bucket({"x": tensors[2]}), [tensors[2]])
    assert torch.equal(second, kept)
    assert torch.equal(third.view(torch.float32).view(3, 4), tensors[2])
    assert third.data_ptr() == first.data_ptr()


def test_weights_are_ordered_by_memory_within_a_piece() -> None:
    matrices, vectors = torch.zeros(40), torch.zeros(8)
    given = {
        "alone": torch.zeros(3),
        "0.bias": vectors[:4],
        "0.weight": matrices[20:],
        "1.bias": vectors[4:],
        "1.weight": matrices[:20],
        "head": matrices[20:],
    }
    assert as_they_lie(given) == ["alone", "0.bias", "1.bias", "1.weight", "0.weight", "head"]
    elsewhere = {name: tensor.to("meta") for name, tensor in given.items()}
    assert as_they_lie(elsewhere) == list(given)


@pytest.mark.parametrize(("stage", "dtype", "copied"), [(0, "float32", 0), (1, "float32", 1), (2, "bfloat16", 1)])
def test_deepspeeds_weights_are_sent_in_place(stage: int, dtype: str, copied: int, tiny_model: Path, tmp_path: Path) -> None:
    """DeepSpeed writes new weights in place, so this holds after a step, too.

    It has two pieces of memory, and the one bucket that spans both is copied.
    """
    sections = {"trainer": {"zero_stage": stage}, "model": {"dtype": dtype}, "loss": {"kl_beta": 0.0}}
    payloads = make_payloads(2, 2)
    given = {"payloads": payloads, "samples": make_samples(payloads), "layout": [[[[0, 1, 2, 3]]]]}
    [[in_place]] = launch(1, [("in place", {"model": tiny_model, "sections": sections, **given})], tmp_path / "ranks")
    assert len(in_place) >= 4, "buckets of several tensors"
    assert in_place.count(False) == copied
