"""Reasons known by name why a model cannot be trained in packed rows. Others are found by trying (proof.py)."""

from __future__ import annotations

from typing import Any

from torch import nn

from services.config.training import Lora
from services.trainer.model.attention import UnsupportedModel

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types that our attention function supports. Recurrent layers would carry state from one response into the next."""

REFUSED = {
    "doge": "masks attention by its own values, which packed attention cannot see",
    "phimoe": "routes tokens to experts differently in training than in sampling (sparse mixer)",
    "recurrent_gemma": "carries a recurrent state from one response of a packed row into the next",
}
"""Types of models that give different results in packed rows, and why."""

FUSED = 3
"""Dimensions of a parameter that holds the matrices of all experts."""


def check(model: Any, path: str, max_tokens: int, sequence_parallel: bool) -> None:
    """Raise `UnsupportedModel` for a model that packed rows of sequences up to `max_tokens` are known to compute incorrectly."""
    text, name = model.config.get_text_config(), named(model, path)
    if why := REFUSED.get(text.model_type):
        raise UnsupportedModel(f"{name} {why}: use another model")
    others = set(getattr(text, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if max_tokens <= (getattr(text, "attention_chunk_size", None) or 0):
        others.discard("chunked_attention")  # one chunk, which is full attention
    if others:
        raise UnsupportedModel(f"{name} has layers of type {sorted(others)}; supported: {sorted(SUPPORTED_LAYERS)}")
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise UnsupportedModel(f"{name} has no linear output layer: use another model")
    if sequence_parallel and (
        getattr(text, "kv_lora_rank", None) or any(n.endswith(".sinks") for n, _ in model.named_parameters())
    ):
        raise UnsupportedModel(
            f"{name} has latent attention or sinks, whose heads cannot be shared among ranks: set trainer.sequence_parallel = 1"
        )


def check_adapters(model: Any, options: Lora, path: str) -> None:
    """Raise `UnsupportedModel` if "all linear layers", or a target that is named, would silently leave out fused experts."""
    fused = sorted({name.rpartition(".")[2] for name, weight in model.named_parameters() if weight.ndim == FUSED})
    if fused and not options.targets:
        raise UnsupportedModel(
            f"{named(model, path)} keeps its experts in fused parameters ({', '.join(fused)}), which adapters do not reach, so "
            "that lora.targets = [] would train attention only without saying so: list the layers to adapt in lora.targets, or "
            "set lora.rank = 0"
        )
    if missed := sorted(set(fused) & set(options.targets)):
        raise UnsupportedModel(
            f"lora.targets names {missed}, but {named(model, path)} keeps its experts in fused parameters of that name, which "
            "adapters do not reach: remove them from lora.targets"
        )


def backbone(model: Any) -> Any:
    """Return the part of a model before its output layer. Llama 4 does not say which it is."""
    return model.model if model.base_model is model else model.base_model


def named(model: Any, path: str) -> str:
    """Return how messages name a model."""
    return f"model.path = {path!r} ({type(model).__name__})"
