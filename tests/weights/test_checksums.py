"""Checksums of tensors: which changes they detect, and what they do not depend on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from services.weights.checksums import WeightChanged, check, checksums

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64]
SIZES = st.one_of(st.integers(1, 40), st.integers(1, 40_000))  # below and above a row of words


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor [n] of any type, with few different values, so that sums may collide, or with arbitrary bytes."""
    dtype, size = draw(st.sampled_from(DTYPES)), draw(SIZES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = draw(st.sampled_from([2, 3, 256]))
    return torch.randint(0, values, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the bytes are equal: a NaN equals itself."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(checksums([a]), checksums([b]))


@given(tensors(), st.data())
def test_one_changed_bit_changes_the_checksum(tensor: torch.Tensor, data: st.DataObject) -> None:
    changed = tensor.clone()
    raw = changed.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not agree(tensor, changed)


@given(tensors(), st.data())
def test_two_swapped_elements_change_the_checksum(tensor: torch.Tensor, data: st.DataObject) -> None:
    places = st.integers(0, tensor.numel() - 1)
    i, j = data.draw(places), data.draw(places)
    changed = tensor.clone()
    changed[i], changed[j] = tensor[j].clone(), tensor[i].clone()
    assume(not same(tensor, changed))
    assert not agree(tensor, changed)


@given(tensors(), st.data())
def test_moved_elements_change_the_checksum(tensor: torch.Tensor, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tensor.numel() - 1))
    by = data.draw(st.sampled_from([1, 2, 1024, 2048]))
    changed = torch.cat([tensor[:start], tensor[start:].roll(by)])
    assume(not same(tensor, changed))
    assert not agree(tensor, changed)


def test_swapped_opposite_signs_change_the_checksum() -> None:
    """Swapped values differ only in the highest bit, which a weighted sum modulo 2^64 cannot distinguish."""
    tensor = torch.zeros(40_000)
    tensor[[1, 30_001]] = torch.tensor([0.5, -0.5])
    changed = tensor.clone()
    changed[[1, 30_001]] = torch.tensor([-0.5, 0.5])
    assert not agree(tensor, changed)


@given(tensors(), st.integers(0, 16))
def test_the_checksum_depends_only_on_the_values(tensor: torch.Tensor, offset: int) -> None:
    inside = torch.cat([torch.zeros(offset, dtype=tensor.dtype), tensor])[offset:]
    assert agree(tensor, inside)
    twice = torch.stack([tensor, tensor])
    assert agree(twice.t(), twice.t().contiguous())
    assert agree(twice, twice.view(-1))


def test_the_checksum_is_the_same_on_all_machines() -> None:
    """Sender and receiver may run on different machines."""
    numbers = torch.arange(5000, dtype=torch.int32)
    assert checksums([numbers]).tolist() == [[-6245662841737281971, 5524801111106019727]]
    assert checksums([torch.empty(0, 3)]).tolist() == [[0, 0]]
    assert checksums([]).shape == (0, 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert checksums([torch.arange(3_000_000)]).tolist() == [[424852087879302116, 5723123636840325069]]
    finally:
        torch.set_num_threads(threads)


@given(st.lists(tensors(), max_size=5))
def test_a_tensors_checksum_does_not_depend_on_others(several: list[torch.Tensor]) -> None:
    several.insert(len(several) // 2, torch.empty(0))
    assert checksums(several).tolist() == [checksums([tensor])[0].tolist() for tensor in several]


def test_the_first_tensor_that_differs_is_named() -> None:
    held = checksums(torch.full((3,), float(i)) for i in range(4))
    sent = held.clone()
    check(["a", "b", "c", "d"], [held[:3], held[3:]], sent)
    sent[2, 1] += 1
    with pytest.raises(WeightChanged, match="of c differ from") as raised:
        check(["a", "b", "c", "d"], [held[:3], held[3:]], sent)
    assert raised.value.tensor == "c"
