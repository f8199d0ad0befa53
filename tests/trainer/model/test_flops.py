"""FLOPs by formula against PyTorch's counter, and attention pairs against a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.model import flops
from services.trainer.model.attention.packing import Packing

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SMALL | {"head_dim": 16, "tie_word_embeddings": True},
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": SMALL | {
        "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 6,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
}  # fmt: skip


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind]), attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the counter does not support grouped matrix products
    return model.train()


@pytest.mark.parametrize("kind", MODELS)
def test_the_formula_matches_pytorchs_counter(kind: str) -> None:
    model, tokens = _model(kind), 24
    known = flops.of_model(model)
    assert known is not None
    counter = FlopCounterMode(display=False)
    with counter:
        logits = model(input_ids=torch.arange(tokens)[None], use_cache=False).logits
        forward = counter.get_total_flops()
        logits.logsumexp(-1).sum().backward()

    def pairs(_: int) -> int:  # eager attention computes the masked scores too
        return tokens * tokens

    assert known.forward(tokens, tokens, pairs) == forward
    assert known.training(tokens, tokens, pairs) == counter.get_total_flops()


@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_attention_pairs_match_the_mask(window: int) -> None:
    for tokens in (1, 3, 4, 9):
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        seen = (distance >= 0) & (distance < (window or tokens))
        assert flops.causal_pairs(tokens, window) == seen.sum()


def test_a_shared_prompt_counts_once_but_its_keys_per_response() -> None:
    known = flops.ModelFlops(trained=100.0, frozen=0.0, output=10.0, output_trained=True, attention={0: 7, 3: 5})
    packing = Packing.of([2 + 3, 4], [(0, 0), (0, 2)])  # a prompt of 2 with a response of 3, and another response of 4
    whole = 15 + (3 + 4 + 5 + 6)
    windowed = (1 + 2 + 3 * 3) + 4 * 3
    assert known.of_row(packing, 7) == 6 * (100 * 9 + 10 * 7 + 7 * whole + 5 * windowed)
    assert known.of_row(packing, 7, trained=False) == 2 * (100 * 9 + 10 * 7 + 7 * whole + 5 * windowed)


def test_frozen_weights_cost_no_weight_gradient() -> None:
    model = _model("qwen3")
    full = flops.of_model(model)
    model.requires_grad_(False)
    frozen = flops.of_model(model)
    assert full is not None
    assert frozen is not None
    cost = [known.training(8, 5, lambda _: 0) for known in (full, frozen)]
    assert cost[1] == pytest.approx(cost[0] * 2 / 3)
    assert full.forward(8, 5, flops.causal_pairs) == frozen.forward(8, 5, flops.causal_pairs)


def test_windows_are_counted_per_layer() -> None:
    config = AutoConfig.for_model("gemma2", **SMALL, head_dim=8, sliding_window=5)
    model = AutoModelForCausalLM.from_config(config)
    known = flops.of_model(model)
    assert known is not None
    assert known.attention == {5: 2 * 4 * 16, 0: 4 * 16}


def test_mixed_head_sizes_have_no_flops_formula() -> None:
    config = AutoConfig.for_model("gemma4_text", **SMALL, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert flops.of_model(model) is None


def test_peak_flops_are_known_by_device_name() -> None:
    peaks = {
        "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA L40S": 362.0,
        "NVIDIA L4": 121.0, "NVIDIA GH200 480GB": 989.4, "NVIDIA A10G": 0.0, "NVIDIA GeForce GTX 1080": 0.0,
    }  # fmt: skip
    assert {name: flops.known_tflops(name) for name in peaks} == peaks
    assert flops.peak_tflops("bfloat16", torch.device("cpu")) == 0
