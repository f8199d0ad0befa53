"""Chunked logprobs against the plain computation, and packed rows against single responses."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.config import ConfigError
from services.config.training import Trainer
from services.protocol.messages import RankPlan
from services.protocol.payloads import Payload
from services.trainer.model import attention
from services.trainer.model import policy_network as model
from services.trainer.model.attention.packing import Packing, gathered
from services.trainer.model.logprobs import LogitRule, token_logprobs
from services.trainer.step import batches
from tests.support.models.tiny_model import VOCABULARY, make_config, make_payloads, make_samples


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_equal_the_whole(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (7,), generator=generator)
    factors = torch.randn(2, 7, generator=generator)

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    table = ((exact[0] @ exact[1].T) / 0.7).log_softmax(-1)
    expected = table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1)
    (factors[0] * expected[0] + factors[1] * expected[1]).sum().backward()

    logprobs, entropy = token_logprobs(hidden, weight, targets, 0.7, chunk)
    (factors[0] * logprobs + factors[1] * entropy).sum().backward()
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", [LogitRule(0.4), LogitRule(cap=2.0), LogitRule(1.7, 3.0)])
def test_scaled_and_capped_logits_equal_the_formula(rule: LogitRule) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).mul(3).requires_grad_() for shape in ((7, 5), (11, 5), (11,))
    )
    targets = torch.randint(0, 11, (7,), generator=generator)
    factors = torch.randn(2, 7, generator=generator)

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = (exact[0] @ exact[1].T + exact[2]) * rule.scale
    logits = logits if rule.cap is None else rule.cap * torch.tanh(logits / rule.cap)
    table = (logits / 0.7).log_softmax(-1)
    expected = table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1)
    (factors[0] * expected[0] + factors[1] * expected[1]).sum().backward()

    logprobs, entropy = token_logprobs(hidden, weight, targets, 0.7, 3, bias=bias, rule=rule)
    (factors[0] * logprobs + factors[1] * entropy).sum().backward()
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip((hidden, weight, bias), exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_bfloat16_weights_get_float32_logprobs() -> None:
    hidden, weight = torch.ones(2, 4, dtype=torch.bfloat16), torch.eye(4, dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 3]), 1.0, 1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.full((2,), -float(np.log(4))))
    torch.testing.assert_close(entropy, torch.full((2,), float(np.log(4))))


def test_a_float32_head_does_not_round_logits_or_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 32, generator=generator).bfloat16().requires_grad_() for size in (6, 50))
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    targets = torch.randint(0, 50, (6,), generator=generator)
    expected, _ = token_logprobs(*exact, targets, 0.7, 4)
    expected.sum().backward()
    logprobs, _ = token_logprobs(hidden, weight, targets, 0.7, 4, fp32=True)
    logprobs.sum().backward()
    assert torch.equal(logprobs, expected)
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad.bfloat16())
    rounded, _ = token_logprobs(hidden, weight, targets, 0.7, 4)
    assert (rounded - expected).abs().max() > 1e-3


def test_zero_tokens_have_a_zero_gradient() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.ones(3, 4, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0, 8)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def _score(scorer: model.Scorer, row: batches.Row) -> torch.Tensor:
    return scorer(row)[0]


def _build(payloads: dict[str, Payload], rows: list[list[int]]) -> list[batches.Row]:
    samples = make_samples(payloads)
    plan = RankPlan([[samples[i] for i in row] for row in rows])
    return batches.build(plan, payloads, vocabulary=VOCABULARY, row_tokens=1000)


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_packed_rows_match_single_responses_and_transformers(
    tiny_model: Path, checkpointing: bool | Literal["selective"]
) -> None:
    from transformers import AutoModelForCausalLM

    scorer = model.load(make_config(tiny_model).model, 0.7, 5, Trainer(gradient_checkpointing=checkpointing)).train()
    payloads = make_payloads(groups=3, size=3)
    order = [4, 0, 8, 2, 6, 1, 7, 3, 5]
    packed = _score(scorer, _build(payloads, [order])[0])
    single = torch.cat([_score(scorer, row) for row in _build(payloads, [[i] for i in order])])
    torch.testing.assert_close(packed, single, rtol=1e-5, atol=1e-5)

    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64, attn_implementation="eager")
    expected = []
    for row in _build(payloads, [[i] for i in order]):
        table = (plain(row.input_ids[None]).logits[0] / 0.7).log_softmax(-1)
        expected.append(table[row.predictors, row.targets])
    torch.testing.assert_close(packed.double(), torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_changing_one_response_leaves_the_others_bitwise_equal(tiny_model: Path) -> None:
    scorer = model.load(make_config(tiny_model).model, 0.7, 5)
    payloads = make_payloads(groups=1, size=5)
    (name, payload), *_ = payloads.items()
    start, end = int(payload.lengths[:2].sum()), int(payload.lengths[:3].sum())
    tokens = payload.tokens.copy()
    tokens[start:end] = (tokens[start:end] + 7) % VOCABULARY
    changed = {name: Payload(payload.prompt, payload.lengths, tokens, payload.logprobs, payload.spans)}
    (before,), (after,) = (_build(groups, [[0, 1, 2, 3, 4]]) for groups in (payloads, changed))
    with torch.no_grad():
        same = _score(scorer, before) == _score(scorer, after)
    assert same[before.sample_of_token != 2].all()
    assert not same[before.sample_of_token == 2].any()


# Groups of a row: tokens of their prompt, and of their responses. A prompt is stored in the row once, before its first response.
SMALL = [(0, [1, 6]), (2, [4, 1, 3]), (9, [4]), (3, [1, 8])]
LARGE = [(0, [3, 300]), (150, [20, 1, 100]), (1, [129, 2])]


def _packing(groups: list[tuple[int, list[int]]]) -> Packing:
    lengths, prompts = [], []
    for prompt, responses in groups:
        begin = sum(lengths)
        if not prompt:  # each is separate
            lengths += responses
            prompts += [(0, 0)] * len(responses)
            continue
        lengths += [prompt + responses[0], *responses[1:]]
        prompts += [(0, 0), *[(begin, prompt)] * len(responses[1:])]
    return Packing.of(lengths, prompts)


def _places(packing: Packing) -> list[list[int]]:
    """Return the indices in the row of each sequence's tokens."""
    ends = packing.whole.tolist()
    return [packing.sequences[begin:end].tolist() for begin, end in itertools.pairwise(ends)]


def test_packing_matches_a_hand_computed_row() -> None:
    packing = _packing([(0, [2]), (2, [1, 2, 1])])
    assert _places(packing) == [[0, 1], [2, 3, 4], [2, 3, 5, 6], [2, 3, 7]]
    assert (packing.own.tolist(), packing.longest_own) == ([0, 2, 5, 7, 8], 3)
    assert (packing.whole.tolist(), packing.longest) == ([0, 2, 5, 9, 12], 4)
    assert packing.filled[packing.owned].tolist() == list(range(8))
    shared = packing.shared.prompts[packing.shared.numbers]
    assert shared.tolist() == packing.filled[packing.shared.slots].tolist() == [2, 3, 2, 3]
    slots = packing.owned.tolist() + packing.shared.slots.tolist()
    assert len(set(slots)) == 12, "no two tokens share a slot"
    longer = packing.longer(3)
    assert _places(longer) == [*_places(packing), [8, 9, 10]]


def test_attention_equals_a_dense_mask() -> None:
    """Each token attends to its sequence up to itself, no further back than the window.

    Value heads are smaller than key heads; scores may be capped, and a sink may take a share of them.
    """
    rows = [(window, SMALL) for window in (None, 1, 3, 50)] + [(window, LARGE) for window in (None, 1, 20, 140, 299)]
    for window, groups in rows:
        for softcap, sinks in ((None, False), (0.7, False), (None, True), (2.0, True)):
            _check_against_a_dense_mask(window, groups, softcap, sinks)


def _check_against_a_dense_mask(
    window: int | None, groups: list[tuple[int, list[int]]], softcap: float | None, sinks: bool
) -> None:
    packing = _packing(groups)
    total = int(packing.own[-1])
    allowed = torch.zeros(total, total, dtype=torch.bool)
    for places in _places(packing):
        for i, place in enumerate(places):
            allowed[place, places[max(0, i + 1 - (window or total)) : i + 1]] = True
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, total, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, size in ((4, 8), (2, 8), (2, 6))
    )
    inputs = [query, key, value]
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -torch.inf)
    sink = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True) if sinks else None
    if sink is not None:
        inputs.append(sink)
        scores = torch.cat((scores, sink.view(1, 4, 1, 1).expand(1, 4, total, 1)), -1)
    expected = (scores.softmax(-1)[..., :total] @ value.repeat_interleave(2, 1)).transpose(1, 2)
    result, _ = attention.packed_attention(
        torch.nn.Identity(), query, key, value, None, packing=packing, scaling=0.3, sliding_window=window, softcap=softcap,
        s_aux=sink,
    )  # fmt: skip
    torch.testing.assert_close(result, expected)
    factors = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((result * factors).sum(), inputs),
        torch.autograd.grad((expected * factors).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_unsupported_attention_arguments_are_rejected() -> None:
    states = torch.zeros(1, 2, 9, 8)
    packing = Packing.of([9])
    mask = torch.zeros(1, 1, 9, 9)
    attend = attention.packed_attention
    with pytest.raises(attention.UnsupportedModel, match="an attention mask of its own"):
        attend(torch.nn.Identity(), states, states, states, mask, packing=packing)
    with pytest.raises(attention.UnsupportedModel, match="dropout"):
        attend(torch.nn.Identity(), states, states, states, None, packing=packing, dropout=0.1)
    with pytest.raises(attention.UnsupportedModel, match="9 tokens, which are not those of the row"):
        attend(torch.nn.Identity(), states, states, states, None, packing=Packing.of([8]))
    with pytest.raises(attention.UnsupportedModel, match="4 sinks for 2 heads"):
        attend(torch.nn.Identity(), states, states, states, None, packing=packing, s_aux=torch.zeros(4))


def test_small_gradients_of_a_shared_prompt_add_up_in_bfloat16() -> None:
    """A prompt shared by 300 responses, each with the same small gradient: a bfloat16 sum would stall at 256."""
    packing = _packing([(1, [1] * 300)])
    states = torch.zeros(301, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    laid: torch.Tensor = attention._Lay.apply(states, packing, packing.shared)  # type: ignore[assignment]
    (gradient,) = torch.autograd.grad(laid.sum(), states)
    assert float(gradient[0]) == 300
    gradient = gathered(torch.ones(600, 1, 1, dtype=torch.bfloat16), packing.originals, packing.shared.copies, packing.shared)
    assert float(gradient[0]) == 300


class _Passes(TorchDispatchMode):
    """Records the operations on states, [n, heads, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim == 3:
            self.names.append(func.name())
        return result


def test_laying_tokens_out_and_taking_them_back_is_one_pass_each() -> None:
    """On a GPU, every further pass over queries, keys or values takes a third as long as their attention."""
    packing = _packing(SMALL)
    states = torch.randn(int(packing.own[-1]), 2, 4)
    with _Passes() as passes:
        laid: Any = attention._Lay.apply(states, packing, packing.shared)
        assert torch.equal(attention._Take.apply(laid, packing), states)  # type: ignore[arg-type]
    assert passes.names == ["aten::index_select"] * 2


def test_padding_at_most_doubles_the_work() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 60).tolist()
    shapes = Packing.of(lengths).shapes
    assert sum(count for count, _ in shapes) == 60
    assert sum(count * length for count, length in shapes) < 2 * sum(lengths)


def test_a_missing_model_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path = .*nowhere"):
        model.load(make_config(tmp_path / "nowhere").model, 1.0, 8)
