"""The operator of fused attention against padded batches, with kernels computed as PyTorch documents them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from services.trainer.model.attention import ALL_ATTENTION_FUNCTIONS, NAME, _padded, fused, packed_attention
from services.trainer.model.attention.current_row import PLAN_ROWS, SHAPES, CurrentRow, row
from services.trainer.model.attention.explicit import ScoreRule
from services.trainer.model.attention.packing import Packing
from services.trainer.model.computing import PLAIN, Computing
from services.trainer.model.logprobs import compiled_chunks
from tests.trainer.model.test_computing import ROW, assert_same, compiler, passed

ROWS = {
    "groups": ROW,
    "alone": Packing.of([5, 1, 9]),
    "a prompt in two runs": Packing.of([6, 3, 4, 2], [(0, 0), (0, 2), (0, 0), (0, 2)]),
    "one batch": Packing.of([6, 4, 4], [(0, 0), (0, 2), (0, 2)]),
}

__all__ = ["compiler"]  # a fixture


def weights(q: Tensor, k: Tensor, scaling: float, window: int) -> Tensor:
    """Return the scores of one sequence, [heads, queries, keys], -inf where a query does not see a key."""
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (behind >= 0) & ((behind < window) if window else (behind >= 0))
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("qhd,khd->hqk", q, keys) * scaling).masked_fill(~seen, -torch.inf)


def one_forward(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int) -> tuple[Tensor, Tensor]:
    scores = weights(q, k, scaling, window)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


def one_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scaling: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate one sequence from its normalisers, [heads, queries], as fused kernels do."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (each.repeat_interleave(groups, 1) for each in (k, v))
    p = (weights(q, k, scaling, window) - lse[..., None]).exp()
    slopes = torch.einsum("qhd,khd->hqk", gradient, values) - (gradient * out).sum(-1).T[..., None]
    scores = p * slopes * scaling
    for_k, for_v = torch.einsum("hqk,qhd->khd", scores, q), torch.einsum("hqk,qhd->khd", p, gradient)
    folded = [each.view(len(k), -1, groups, each.shape[-1]).sum(2) for each in (for_k, for_v)]
    return torch.einsum("hqk,khd->qhd", scores, keys), folded[0], folded[1]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float, window: int) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for (q0, q1), (k0, k1) in bounds(packing):
        out[q0:q1], lse[:, q0:q1] = one_forward(q[q0:q1], k[k0:k1], v[k0:k1], scaling, window)
    return out, lse


def flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, scaling: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for (q0, q1), (k0, k1) in bounds(packing):
        a, b = slice(q0, q1), slice(k0, k1)
        parts = one_backward(gradient[a], q[a], k[b], v[b], out[a], lse[:, a], scaling, window)
        for whole, part, place in zip(found, parts, (a, b, b), strict=True):
            whole[place] = part
    return found


def bounds(packing: Packing) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    assert (packing.longest_own, packing.longest) == (int(packing.own.diff().max()), int(packing.whole.diff().max()))
    yield from zip(itertools.pairwise(packing.own.tolist()), itertools.pairwise(packing.whole.tolist()), strict=True)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    parts = [one_forward(*(each.transpose(0, 1) for each in one), scaling, 0) for one in zip(q, k, v, strict=True)]
    return torch.stack([out for out, _ in parts]).transpose(1, 2), torch.stack([lse for _, lse in parts])[..., None]


def cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    assert all(each.transpose(1, 2).is_contiguous() for each in (gradient, q, k, v, out)), "the layout that has one plan"
    found = []
    for *states, of_one in zip(gradient, q, k, v, out, lse, strict=True):
        found.append(one_backward(*(each.transpose(0, 1) for each in states), of_one[..., 0], scaling, 0))
    for_q, for_k, for_v = (torch.stack(each).transpose(1, 2) for each in zip(*found, strict=True))
    return for_q, for_k, for_v


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the kernels of GPUs on the CPU."""
    for kernel in (flash_forward, flash_backward, cudnn_forward, cudnn_backward):
        monkeypatch.setattr(fused, kernel.__name__, kernel)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_operator_equals_padded_batches(
    window: int | None, name: str, dense: bool, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_dense", lambda q, packing, window: dense and not window)
    packing = ROWS[name]
    monkeypatch.setattr(row, "packing", packing)
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(int(packing.own[-1]), heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    scores = ScoreRule(0.3, window)
    both = fused.attend(*states, scores), _padded(*states, packing, scores)
    factors = torch.randn(both[0].shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(*both)
    for ours, theirs in zip(*(torch.autograd.grad((output * factors).sum(), states) for output in both), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_operator_refuses_tokens_of_another_row(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row, "packing", Packing.of([3]))
    with pytest.raises(RuntimeError, match="attention over 2 tokens, which are not those of the current row"):
        fused.attend(*(torch.zeros(2, 1, 8) for _ in range(3)), ScoreRule(1.0))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is the GPU for which cuDNN's kernel was measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: fused.HOPPER)
    monkeypatch.delenv(fused.PLANS, raising=False)


QUERY, EVEN, UNEVEN = torch.empty(8, 4, 128), Packing.of([4, 4]), Packing.of([5, 5, 5, 8])


def test_batches_are_used_where_little_of_them_is_padding(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (EVEN.work, EVEN.padded_work, UNEVEN.work, UNEVEN.padded_work) == (32, 32, 139, 256)
    assert not fused._dense(QUERY, EVEN, fused.WHOLE), "the shape has not recurred"
    monkeypatch.setattr(row, "recurs", True)
    assert fused._dense(QUERY, EVEN, fused.WHOLE)
    assert not fused._dense(QUERY, UNEVEN, fused.WHOLE)
    with row.planning():
        assert fused._dense(QUERY, UNEVEN, fused.WHOLE)


def test_cudnn_gets_no_row_that_its_kernel_does_not_take(hopper: None) -> None:
    with row.planning():
        assert fused._dense(QUERY, EVEN, fused.WHOLE)
        assert not fused._dense(QUERY, EVEN, 3)
        assert not fused._dense(torch.empty(8, 4, 256), EVEN, fused.WHOLE)
        for length in (1, 100):
            assert fused._dense(QUERY, Packing.of([length, 100]), fused.WHOLE) == (length > 1)
        assert not fused._dense(QUERY, Packing.of([1]), fused.WHOLE), "an empty row"


@pytest.mark.parametrize("why", ["deterministic", "another GPU", "other normalisers", "disabled"])
def test_cudnn_is_used_only_where_it_was_measured(why: str, hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused.plans()
    match why:
        case "deterministic":
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        case "another GPU":
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
        case "other normalisers":
            monkeypatch.setenv(fused.PLANS, "1")
        case _:
            monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert not fused.plans()
    with row.planning():
        assert not fused._dense(QUERY, EVEN, fused.WHOLE)


def test_a_shape_is_planned_for_when_it_recurs() -> None:
    rows, found = CurrentRow(), list[bool]()

    def begin(count: int) -> bool:
        rows.begin(cast(Packing, SimpleNamespace(shapes=((count, 4),), owned=SimpleNamespace(is_cuda=True))))
        return rows.recurs

    for i in range(PLAN_ROWS + 1):
        found.append(begin(2))
        assert not begin(3 + i)
    assert found == [False] * PLAN_ROWS + [True]
    with torch.no_grad():
        for _ in range(PLAN_ROWS + 1):
            assert not begin(1), "a row that is only scored does not count"
    for i in range(2 * SHAPES):
        begin(100 + i)
    assert len(rows._seen) <= SHAPES
    assert begin(2)


@pytest.mark.slow  # imports a compiler, and traces
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore::DeprecationWarning")
def test_a_compiled_block_is_one_graph_around_the_operator(
    tiny_model: Path, compiler: None, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **named: compiled(function, **{**named, "backend": "aot_eager"}))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, packed_attention)  # compilation replaces it
    monkeypatch.setattr(fused, "available", lambda: True)
    monkeypatch.setattr(fused, "fits", lambda q, k, v, scores: True)
    monkeypatch.setattr(fused, "_dense", lambda q, packing, window: False)
    compiled_chunks.cache_clear()
    expected = passed(tiny_model, PLAIN)
    torch._dynamo.utils.counters.clear()
    found = passed(tiny_model, Computing(compiled=True))
    compiled_chunks.cache_clear()
    assert_same(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3, "the block, and both passes of the logprobs"
    assert not torch._dynamo.utils.counters["graph_break"]
