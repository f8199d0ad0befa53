"""Recomputation and compilation do not change results."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.config import ConfigError
from services.config.training import Trainer
from services.trainer.model import attention, logprobs, policy_network
from services.trainer.model.attention import ALL_ATTENTION_FUNCTIONS, NAME, packed_attention, takes_groups
from services.trainer.model.attention.packing import Packing, RowTokens
from services.trainer.model.logprobs import PLAIN as PLAIN_RULE
from services.trainer.model.logprobs import LogitRule, _differentiated, compiled_chunks, token_logprobs
from tests.support.models.tiny_model import make_config

ROW = Packing.of([6, 3, 4, 5, 2], [(0, 0), (0, 2), (0, 2), (0, 0), (13, 3)])
"""Three responses to one prompt of two tokens and two to one of three, 20 tokens."""


@pytest.fixture
def compiler() -> Iterator[None]:
    """Enable the compiler, which test processes otherwise avoid."""
    import torch._dynamo

    torch._dynamo.reset()  # forgets what it has decided not to compile
    with torch._dynamo.config.patch(disable=False):
        yield


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in ("aten::mm", "aten::addmm", "aten::bmm")
        return func(*args, **(kwargs or {}))


def passed(tiny_model: Path, trainer: Trainer) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return what `scored` does for a model that is loaded for it."""
    return scored(policy_network.load(make_config(tiny_model).model, 0.7, 5, trainer).train())


def scored(scorer: policy_network.Scorer) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return the logprobs of a row, the gradients of their weighted sum, and the number of matrix products in backward."""
    tokens = torch.arange(20) % 7
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 2, 3, 4, 2, 3, 4, 5, 0, 1, 2, 3, 4, 3, 4])
    predictors, targets = torch.tensor([1, 2, 3, 4, 6, 9, 15, 18]), torch.arange(8)
    logprobs, entropy = scorer(RowTokens(tokens, positions, ROW, predictors, targets))
    with Products() as products:
        (logprobs * torch.linspace(0.5, 1.5, 8) + 0.1 * entropy).sum().backward()
    gradients = {name: weight.grad for name, weight in scorer.named_parameters() if weight.grad is not None}
    return logprobs.detach(), gradients, products.count


def assert_same(found: tuple[Tensor, dict[str, Tensor], int], expected: tuple[Tensor, dict[str, Tensor], int]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_selective_recomputation_repeats_no_matrix_product(tiny_model: Path) -> None:
    plain, selective, whole = (passed(tiny_model, Trainer(gradient_checkpointing=each)) for each in (False, "selective", True))
    assert_same(selective, plain)
    assert_same(whole, plain)
    assert selective[2] == plain[2] < whole[2]


@pytest.mark.slow  # imports a compiler, and traces
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore::DeprecationWarning")
def test_compiled_blocks_and_logprobs_match_eager(tiny_model: Path, compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler traces and differentiates, but does not compile to C++, which takes a minute."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **named: compiled(function, **{**named, "backend": "aot_eager"}))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, packed_attention)  # compilation replaces it
    compiled_chunks.cache_clear()
    expected = passed(tiny_model, Trainer())
    found = passed(tiny_model, Trainer(compile=True))
    compiled_chunks.cache_clear()
    assert_same(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 4, "the parts of a block, and both passes of the logprobs"


def test_products_that_are_kept_are_not_computed_again_and_give_the_same_bits() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(40, 8, dtype=torch.bfloat16, requires_grad=True)
    targets, found = torch.arange(11), list[list[Tensor]]()
    counts: list[int] = []
    for keep in (False, True):
        logprobs, entropy = token_logprobs(hidden, weight, targets, 0.7, 4, rule=LogitRule(0.5, 3.0), keep=keep)
        with Products() as products:
            found.append([logprobs, entropy, *torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))])
        counts.append(products.count)
    for again, kept in zip(*found, strict=True):
        assert torch.equal(again, kept)
    assert counts == [9, 6], "three chunks"


def test_scoring_without_a_gradient_keeps_one_product_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference policy and groups without a gradient have no backward pass that would need them."""
    held: list[weakref.ref[Tensor]] = []
    most = 0

    def product(hidden: Tensor, matrix: Tensor) -> Tensor:
        nonlocal most
        made = hidden @ matrix.T
        held.append(weakref.ref(made))
        most = max(most, sum(each() is not None for each in held))
        return made

    monkeypatch.setattr(logprobs, "_product", product)
    hidden = torch.randn(12, 8, dtype=torch.bfloat16)
    weight = torch.randn(40, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        token_logprobs(hidden, weight, torch.arange(12), 0.7, 2, keep=True)
    assert (len(held), most) == (6, 1)


def test_the_compiled_gradient_of_logits_is_one_pass(compiler: None) -> None:
    """Scattering into it would need all of it in memory, in float32."""
    seen: list[str] = []

    def noting(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.manual_seed(0)
    hidden, matrix, targets = torch.randn(5, 4), torch.randn(9, 4), torch.tensor([0, 8, 3, 3, 1])
    given = (hidden, matrix, None, targets, 0.7, PLAIN_RULE, torch.randn(5), torch.rand(5), torch.randn(5), None, False)
    found, _ = torch.compile(_differentiated, backend=noting)(*given)
    torch.testing.assert_close(found, _differentiated(*given)[0])
    assert "where" in " ".join(seen)
    assert "scatter" not in " ".join(seen)


def test_a_gpu_without_a_kernel_for_shared_heads_gets_a_head_for_each_query() -> None:
    """PyTorch would silently keep all scores of a batch, 2 GB per layer for eight sequences of 2,048 tokens and 16 heads."""

    def states(dtype: torch.dtype, size: int, cuda: bool = True) -> Any:
        return SimpleNamespace(is_cuda=cuda, dtype=dtype, shape=(20, 4, size))

    half, full = torch.bfloat16, torch.float32
    assert takes_groups(states(half, 128), states(half, 128), masked=False)
    assert takes_groups(states(full, 320, cuda=False), states(full, 16, cuda=False), masked=True)
    assert not takes_groups(states(full, 128), states(full, 128), masked=False)
    assert not takes_groups(states(half, 128), states(half, 128), masked=True)
    assert not takes_groups(states(half, 320), states(half, 320), masked=False)
    assert not takes_groups(states(half, 192), states(half, 128), masked=False)


@pytest.mark.parametrize("window", [None, 3])
def test_heads_that_are_repeated_give_the_same_results_and_gradients(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    given = [torch.randn(1, heads, 20, 16, requires_grad=True) for heads in (4, 2, 2)]
    compute, found, grouped = F.scaled_dot_product_attention, list[list[Tensor]](), set[bool]()

    def noting(*states: Tensor, enable_gqa: bool, **named: Any) -> Tensor:
        grouped.add(enable_gqa)
        return compute(*states, enable_gqa=enable_gqa, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    for fits in (True, False):
        monkeypatch.setattr(attention, "takes_groups", lambda *_, fits=fits: fits)
        output, _ = packed_attention(torch.nn.Identity(), *given, None, packing=ROW, sliding_window=window)
        found.append([output, *torch.autograd.grad((output * torch.linspace(0.5, 1.5, 16)).sum(), given)])
        assert grouped == {fits}
        grouped.clear()
    for repeated, shared in zip(*found, strict=True):
        torch.testing.assert_close(repeated, shared, rtol=1e-5, atol=1e-5)


def test_what_compilation_is_incompatible_with_is_rejected(tiny_model: Path) -> None:
    for key, value in (("deterministic", True), ("zero_stage", 3), ("sequence_parallel", 2)):
        with pytest.raises(ConfigError, match=rf"trainer\.compile = true and trainer\.{key} = {str(value).lower()} are"):
            make_config(tiny_model, trainer={"compile": True, "ranks": 2, key: value})
