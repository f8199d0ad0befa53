"""The operator of fused attention against padded batches, with kernels that compute their formulas on a CPU."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import structlog
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from services.config.training import Trainer
from services.trainer.model import computing, policy_network
from services.trainer.model.attention import ALL_ATTENTION_FUNCTIONS, NAME, _padded, flash2, flash4, fused, packed_attention
from services.trainer.model.attention.explicit import ScoreRule
from services.trainer.model.attention.packing import Packing, row
from services.trainer.model.logprobs import compiled_chunks
from tests.support.models.tiny_model import make_config
from tests.trainer.model.test_computing import ROW, assert_same, compiler, passed, scored

ROWS = {
    "groups": ROW,
    "alone": Packing.of([5, 1, 9]),
    "a prompt in two runs": Packing.of([6, 3, 4, 2], [(0, 0), (0, 2), (0, 0), (0, 2)]),
}

__all__ = ["compiler"]  # a fixture


class OnCpu:
    """Kernels, sequence by sequence. The backward pass starts from the normalisers, as kernels do."""

    @staticmethod
    def computes(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> bool:
        return True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: ScoreRule) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], len(q))
        for mine, theirs in places(packing):
            found = values_of(q[mine], k[theirs], scores)
            if scores.sinks is not None:
                found = torch.cat((found, scores.sinks[:, None, None].expand(*found.shape[:2], 1)), -1)
            lse[:, mine] = found.logsumexp(-1)
            weights = found.softmax(-1)[..., : len(k[theirs])]
            out[mine] = torch.einsum("hqk,khd->qhd", weights, per_head(v[theirs], q))
        return out, lse

    @staticmethod
    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, scores: ScoreRule
    ) -> tuple[Tensor, ...]:
        found = [torch.zeros_like(each) for each in (q, k, v)]
        behind = (gradient * out).sum(-1).T  # [heads, T]
        for mine, theirs in places(packing):
            values = values_of(q[mine], k[theirs], scores)
            p = (values - lse[:, mine, None]).exp()
            slopes = torch.einsum("qhd,khd->hqk", gradient[mine], per_head(v[theirs], q)) - behind[:, mine, None]
            slopes *= p * scores.scaling
            if scores.softcap is not None:
                slopes *= (1 - (values / scores.softcap) ** 2).nan_to_num(0, 0, 0)
            found[0][mine] = torch.einsum("hqk,khd->qhd", slopes, per_head(k[theirs], q))
            found[1][theirs] = folded(torch.einsum("hqk,qhd->khd", slopes, q[mine]), k)
            found[2][theirs] = folded(torch.einsum("hqk,qhd->khd", p, gradient[mine]), v)
        if scores.sinks is not None:
            found.append(-((scores.sinks[:, None] - lse).exp() * behind).sum(-1))
        return tuple(found)


def per_head(states: Tensor, q: Tensor) -> Tensor:
    return states.repeat_interleave(q.shape[1] // states.shape[1], 1)


def folded(gradient: Tensor, states: Tensor) -> Tensor:
    """Undo `per_head` for a gradient."""
    return gradient.view(len(gradient), states.shape[1], -1, states.shape[2]).sum(2)


def values_of(q: Tensor, k: Tensor, scores: ScoreRule) -> Tensor:
    """Return the scores of one sequence, [heads, queries, keys], -inf where a query does not see a key."""
    found = torch.einsum("qhd,khd->hqk", q, per_head(k, q)) * scores.scaling
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = behind >= 0 if scores.window is None else (behind >= 0) & (behind < scores.window)
    return found.masked_fill(~seen, -torch.inf)


def places(packing: Packing) -> Iterator[tuple[slice, slice]]:
    assert (packing.longest_own, packing.longest) == (int(packing.own.diff().max()), int(packing.whole.diff().max()))
    for mine, theirs in zip(itertools.pairwise(packing.own.tolist()), itertools.pairwise(packing.whole.tolist()), strict=True):
        yield slice(*mine), slice(*theirs)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the kernels of GPUs on the CPU."""
    monkeypatch.setattr(fused, "available", lambda: (OnCpu,))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("rule", [(None, None, False), (1, None, False), (3, None, True), (None, 0.7, False), (3, 0.7, True)])
def test_the_operator_equals_padded_batches(
    rule: tuple[int | None, float | None, bool], name: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = ROWS[name]
    monkeypatch.setattr(row, "packing", packing)
    torch.manual_seed(0)
    tokens, (window, softcap, sinks) = int(packing.own[-1]), rule
    states = [drawn(tokens, 4, 8), drawn(tokens, 2, 8), drawn(tokens, 2, 6 if softcap else 8)]
    scores = ScoreRule(0.3, window, softcap, drawn(4) if sinks else None)
    both = fused.attend(*states, scores), _padded(*states, packing, scores)
    factors = torch.randn(both[0].shape, dtype=torch.float64)
    torch.testing.assert_close(*both)
    inputs = states if scores.sinks is None else [*states, scores.sinks]
    for ours, theirs in zip(*(torch.autograd.grad((output * factors).sum(), inputs) for output in both), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("selective", [False, True])
def test_a_layer_around_the_operator_can_be_recomputed(selective: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Counted(OnCpu):
        @staticmethod
        def forward(*given: Any) -> tuple[Tensor, Tensor]:
            calls.append(1)
            return OnCpu.forward(*given)

    monkeypatch.setattr(fused, "available", lambda: (Counted,))
    monkeypatch.setattr(row, "packing", ROWS["groups"])
    tokens = int(ROWS["groups"].own[-1])
    states, scores = [drawn(tokens, heads, 8) for heads in (4, 2, 2)], ScoreRule(0.3, sinks=drawn(4) if sinks else None)
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, computing._keep)} if selective else {}

    def layer(*given: Tensor) -> Tensor:
        return fused.attend(*(each.sin() for each in given), scores).cos()

    inputs = [*states, *([scores.sinks] if scores.sinks is not None else [])]
    expected = torch.autograd.grad(layer(*states).sum(), inputs)
    found = torch.autograd.grad(checkpoint(layer, *states, use_reentrant=False, **options).sum(), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(calls) == (2 if selective else 3)


def test_the_operator_is_described_to_the_compiler_as_it_is(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row, "packing", ROWS["groups"])
    tokens = int(ROWS["groups"].own[-1])
    states = [torch.randn(tokens, heads, size, requires_grad=True) for heads, size in ((4, 8), (2, 8), (2, 6))]
    for sinks in (None, torch.randn(4, requires_grad=True)):
        given = (*states, sinks, 0.3, 3, 0.0)
        torch.library.opcheck(torch.ops.grpo.packed_attention.default, given, test_utils=("test_schema", "test_faketensor"))


def test_the_operator_refuses_tokens_of_another_row(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row, "packing", Packing.of([3]))
    with pytest.raises(RuntimeError, match="attention over 2 tokens, which are not those of the current row"):
        fused.attend(*(torch.zeros(2, 1, 8) for _ in range(3)), ScoreRule(1.0))


SINKS = torch.zeros(4)


@pytest.mark.parametrize(
    ("size", "values", "scores", "expected"),
    [
        (128, 128, ScoreRule(1.0), flash4),
        (128, 128, ScoreRule(1.0, 16, 30.0), flash4),
        (64, 64, ScoreRule(1.0, None, None, SINKS), flash4),
        (192, 128, ScoreRule(1.0), flash4),
        (64, 128, ScoreRule(1.0), None),
        (80, 80, ScoreRule(1.0, 16), flash2),
        (80, 80, ScoreRule(1.0, None, 30.0), None),
        (80, 64, ScoreRule(1.0), None),
        (320, 320, ScoreRule(1.0), None),
        (60, 60, ScoreRule(1.0), None),
    ],
)
def test_the_fastest_kernels_that_compute_a_layer_are_chosen(
    size: int, values: int, scores: ScoreRule, expected: ModuleType | None
) -> None:
    def chosen(kv_heads: int = 4, dtype: torch.dtype = torch.bfloat16, cuda: bool = True) -> object:
        shapes = (3, 4, size), (3, kv_heads, size), (3, kv_heads, values)
        q, k, v = (cast(Tensor, SimpleNamespace(shape=shape, dtype=dtype, is_cuda=cuda)) for shape in shapes)
        return fused.kernels_of((flash4, flash2), q, k, v, scores)

    assert chosen() is expected
    assert chosen(kv_heads=2) is (expected if size == values else None)
    assert chosen(dtype=torch.float32) is chosen(cuda=False) is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Pretend that there is a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: flash4.HOPPER)
    fresh()
    yield monkeypatch
    fresh()


def fresh() -> None:
    for cached in (fused.available, flash4.installed, flash4._kernels):
        cached.cache_clear()


def test_version_2_computes_where_version_4_is_not_installed(gpu: pytest.MonkeyPatch) -> None:
    with structlog.testing.capture_logs() as logs:
        assert fused.available() == (flash2,)
    assert not logs
    gpu.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    fresh()
    assert fused.available() == ()


def test_version_2_computes_where_version_4_cannot_be_imported(gpu: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("No CTK flavor installed\nTry another")

    gpu.setattr(flash4, "version", lambda package: "4.1")
    gpu.setattr(flash4, "_kernels", broken)
    with structlog.testing.capture_logs() as logs:
        assert fused.available() == (flash2,)
    assert logs == [
        {
            "event": "FlashAttention 4 cannot be used; attention takes longer without it", "log_level": "warning",
            "package": "flash-attn-4", "error": "RuntimeError: No CTK flavor installed",
        }
    ]  # fmt: skip
    gpu.undo()  # caches of the replaced functions


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 0)])
def test_version_4_computes_on_the_gpus_on_which_it_was_measured(capability: tuple[int, int], gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda: capability)
    gpu.setattr(flash4, "version", lambda package: "4.1")
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        gpu.setitem(sys.modules, name, ModuleType(name))
    assert flash4.installed() == ("4.1" if capability == flash4.HOPPER else "")
    assert fused.available() == ((flash4, flash2) if capability == flash4.HOPPER else (flash2,))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("deterministic", [False, True])
def test_version_4_gets_a_row_by_its_arguments(window: int | None, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, dict[str, Any]] = {}

    def forward(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> tuple[Any, ...]:
        given["forward"] = named
        return "out", "lse", None, None, None

    def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, gradient: Tensor, lse: Tensor, **named: Any) -> tuple[Any, ...]:
        given["backward"] = named
        return q, k, v, "sinks"

    monkeypatch.setattr(flash4, "_kernels", lambda: SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    q, packing, scores = torch.empty(3, 4, 64), ROWS["groups"], ScoreRule(0.5, window, 30.0, SINKS)
    assert flash4.forward(q, q, q, packing, scores) == ("out", "lse")
    assert flash4.backward(q, q, q, q, q, q, packing, scores)[3] == "sinks"
    assert given["forward"].pop("return_lse")
    assert given["backward"].pop("deterministic") == deterministic
    assert given["forward"] == given["backward"]
    shown = given["forward"]
    assert (shown.get("causal"), shown.get("window_size_left"), shown.get("window_size_right")) == (
        (True, None, None) if window is None else (None, window - 1, 0)
    )
    assert (shown["softmax_scale"], shown["softcap"], shown["learnable_sink"]) == (0.5, 30.0, SINKS)
    assert (shown["cu_seqlens_q"], shown["cu_seqlens_k"]) == (packing.own, packing.whole)
    assert (shown["max_seqlen_q"], shown["max_seqlen_k"]) == (packing.longest_own, packing.longest)


@pytest.mark.slow  # imports a compiler, and traces
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore::DeprecationWarning")
def test_a_compiled_block_is_one_graph_around_the_operator_for_rows_of_any_length(
    tiny_model: Path, compiler: None, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **named: compiled(function, **{**named, "backend": "aot_eager"}))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, packed_attention)  # compilation replaces it
    compiled_chunks.cache_clear()
    expected = passed(tiny_model, Trainer())
    torch._dynamo.utils.counters.clear()
    scorer = policy_network.load(make_config(tiny_model).model, 0.7, 5, Trainer(compile=True)).train()
    found = scored(scorer)
    compiled_chunks.cache_clear()
    assert_same(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3, "the block, and both passes of the logprobs"
    for length in (13, 30, 41):
        monkeypatch.setattr(row, "packing", Packing.of([length - 5, 5]))
        places = torch.arange(length)[None]
        scorer.model.model(input_ids=places % 7, position_ids=places, packing=row.packing, use_cache=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3, "the block serves rows of other lengths"
    assert not torch._dynamo.utils.counters["graph_break"]
