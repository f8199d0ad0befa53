"""Tiny random models of every type of causal language model in transformers, from the defaults of their classes.

Guarantees: sizes are small, and every feature that a class has by default stays on: dropout, caps, sinks, windows, experts.
Parameters are moved away from their initial values, since zeros and ones hide what a term does.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 128
LARGEST = 20_000_000
"""Parameters above which a model is not tiny: it has sizes under names that `SIZES` does not know."""
LAYERS = 4  # includes every kind of layer, even where only every fourth one differs

SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|vocab_size_per_layer_input|model_vocab_size", VOCABULARY),
    (r"num_hidden_layers|n_layers?|num_layers|num_blocks|(en|de)coder_layers|num_encoder_layers|num_decoder_layers", LAYERS),
    (r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|num_(en|de)coder_attention_heads", 4),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num|num_global_key_value_heads|swa_num_key_value_heads", 2),
    (r"swa_num_attention_heads|attention_head_num", 4),
    (r"hidden_size|d_model|n_embd|dim|embedding_size|lru_width|d_embed|embed_dim|decoder_hidden_size", 64),
    (r"head_dim|attention_head_dim|qk_nope_head_dim|v_head_dim|kv_channels|head_size|swa_head_dim|swa_v_head_dim", 16),
    (r"global_head_dim|index_head_dim|linear_key_head_dim|linear_value_head_dim|attention_hidden_size_per_head", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r".*intermediate_size.*|ffn_dim|n_inner|ffn_hidden_size|(en|de)coder_ffn_dim|d_ff|inner_dim|dff|d_inner", 64),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank|index_topk|hidden_size_per_layer_input|laurel_rank", 16),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|num_experts_per_token|top_k_experts|moe_top_k", 2),
    (r"n_group|topk_group|num_nextn_predict_layers|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_sequence_length|max_target_positions", 512),
    (r"sliding_window|attention_window|local_attention|attention_window_size|sliding_window_size", 8),
    (r"linear_num_key_heads|linear_num_value_heads|mamba_n_heads|mamba_num_heads|index_n_heads", 4),
    (r"mamba_d_head|mamba_head_dim|ssm_state_size|state_size|mamba_d_state|mamba_d_ssm", 16),
)
"""Names of sizes, as regular expressions, and the size of a tiny model."""


def types() -> list[str]:
    """Return every type of causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """Build the model in float32, with `changes` of its configuration.

    Raises whatever its class raises, and `ValueError` if it is not tiny.
    """
    kind = CONFIG_MAPPING[model_type]
    config = kind(**(_small(kind().to_dict()) | EXCEPTIONS.get(model_type, {}) | changes))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    move(model, seed)
    return model


@torch.no_grad()
def move(model: torch.nn.Module, seed: int) -> None:
    """Add noise to every parameter, to matrices enough to spread the logits."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = 0.3 if parameter.ndim < 2 else 1.2 * parameter[0].numel() ** -0.5 if parameter.ndim == 2 else 0.2
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def _small(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a configuration, as far as they have a known name, made small."""
    small: dict[str, Any] = {}
    latent = "qk_rope_head_dim" in tree
    for key, value in tree.items():
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = _small(value) | ({"model_type": value["model_type"]} if "model_type" in value else {})
        elif key in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id") and value is not None:
            small[key] = 1
        elif type(value) is int or (key in ("sliding_window", "head_dim") and value is not None):
            for pattern, size in SIZES:
                if re.fullmatch(pattern, key):
                    small[key] = min(size, value) if isinstance(value, int) and value > 0 else value
                    break
    if latent and "head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]  # of the part of heads that is rotated
    if latent and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]  # every head has keys of its own
    return small


EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cpmant": {"dim_ff": 64},
    "roc_bert": {"shape_vocab_size": VOCABULARY, "pronunciation_vocab_size": VOCABULARY},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "intermediate_size": [64] * 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "longcat_flash": {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 64, "zero_expert_num": 2},
}
"""Further sizes that a type needs."""
