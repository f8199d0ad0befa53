"""FLOPs that training needs, from a model's matrices and its configuration. A multiply-add counts as two.

Guarantees: only what the formula of the model needs is counted: a matrix once for each token that passes through it, of experts
the ones that a token is routed to, and attention for the pairs of a query with the keys that it may see. What is computed again
(checkpointing, logits) or thrown away (padding, masked scores) does not count. Backward costs twice the forward: once for inputs,
once for weights, which frozen weights save. Embeddings are look-ups and cost nothing.
Left out: normalisation, activations and other element-wise work, and the second passes of layers that are applied repeatedly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from services.trainer.model.attention.packing import Packing
from services.trainer.model.support import FUSED

ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""Names under which configurations have the number of experts per token."""

EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the name of a weight of one expert, where a model keeps experts apart."""

OTHER_SENSES = re.compile(r"vision|visual|audio|image")
"""In the name of a weight that text does not pass through."""

PEAK_TFLOPS = {
    "V100": 125.0,  # NVIDIA V100 data sheet (float16)
    "A10": 125.0,  # NVIDIA A10 data sheet
    "A30": 165.0,  # NVIDIA A30 data sheet
    "A40": 149.7,  # NVIDIA A40 data sheet
    "A100": 312.0,  # NVIDIA A100 data sheet
    "L4": 121.0,  # NVIDIA L4 data sheet
    "L40": 181.0,  # NVIDIA L40 data sheet
    "L40S": 362.0,  # NVIDIA L40S data sheet
    "H100": 989.4,  # NVIDIA H100 data sheet, SXM
    "H100 PCIe": 756.0,  # NVIDIA H100 architecture white paper
    "H100 NVL": 835.5,  # NVIDIA H100 data sheet
    "GH200": 989.4,  # NVIDIA GH200 data sheet
    "H200": 989.4,  # NVIDIA H200 data sheet, SXM
    "H200 NVL": 835.5,  # NVIDIA H200 data sheet
    "B200": 2250.0,  # NVIDIA DGX B200 data sheet, an eighth
    "GB200": 2500.0,  # NVIDIA GB200 data sheet
    "MI300X": 1307.4,  # AMD Instinct MI300X data sheet
    "MI325X": 1307.4,  # AMD Instinct MI325X data sheet
}
"""Dense bfloat16 tensor FLOP/s by a part of the device's name, in 10^12. Figures with sparsity are twice these."""


WHOLE = 0
"""Window of full attention, which sees all earlier tokens."""


@dataclass(frozen=True)
class ModelFlops:
    """The quantities from which a model's FLOPs are computed."""

    trained: float  # elements of trained matrices that a token passes through, without the output layer
    frozen: float  # the same of frozen ones
    output: float  # elements of the output layer, which only tokens in the loss pass through
    output_trained: bool
    attention: Mapping[int, int]  # by window: sum over layers of heads x (size of keys + size of values)

    def forward(self, tokens: int, predicted: int, pairs: Callable[[int], int]) -> float:
        """Return the FLOPs of a forward pass. `predicted`: tokens in the loss. `pairs`: query-key pairs by window."""
        return 2.0 * ((self.trained + self.frozen) * tokens + self.output * predicted + self._scores(pairs))

    def training(self, tokens: int, predicted: int, pairs: Callable[[int], int]) -> float:
        """Return the FLOPs of a forward and a backward pass."""
        saved = self.frozen * tokens + (0.0 if self.output_trained else self.output * predicted)
        return 3.0 * self.forward(tokens, predicted, pairs) - 2.0 * saved

    def of_row(self, packing: Packing, predicted: int, trained: bool = True) -> float:
        """Return the FLOPs of training on a packed row, or of its forward pass alone; a shared prompt counts once."""
        whole, own = packing.whole.diff().tolist(), packing.own.diff().tolist()

        def pairs(window: int) -> int:
            return sum(
                causal_pairs(all_, window) - causal_pairs(all_ - mine, window) for all_, mine in zip(whole, own, strict=True)
            )

        return (self.training if trained else self.forward)(sum(own), predicted, pairs)

    def _scores(self, pairs: Callable[[int], int]) -> int:
        return sum(width * pairs(window) for window, width in self.attention.items())


def causal_pairs(tokens: int, window: int = WHOLE) -> int:
    """Return how many query-key pairs a sequence has if each token sees itself and those before it, `window` in all."""
    ramp = min(tokens, window) if window else tokens
    return ramp * (ramp + 1) // 2 + (tokens - ramp) * window


def of_model(model: Any) -> ModelFlops | None:
    """Return the quantities from which the FLOPs of a causal language model are computed.

    Returns None if its configuration does not have the number of experts of a token, or one size of heads for all layers.
    """
    config = model.config.get_text_config()
    try:
        attention = _attention(config)
    except (AttributeError, TypeError, RuntimeError):  # the last is raised where layers differ
        return None
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    output = model.get_output_embeddings().weight
    routed = next((value for name in ROUTED if isinstance(value := getattr(config, name, None), int)), None)
    experts = _experts(model)
    sizes = {True: 0.0, False: 0.0}  # trained or not -> elements
    for name, weight in model.named_parameters():
        if weight is output or id(weight) in looked_up or name.endswith("bias") or OTHER_SENSES.search(name):
            continue
        share = 1.0
        if weight.ndim == FUSED or EXPERT.search(name):
            if routed is None:
                return None
            count = len(weight) if weight.ndim == FUSED else experts[EXPERT.split(name)[0]]
            share = min(1.0, routed / count)
        if weight.ndim >= 2:
            sizes[weight.requires_grad] += weight.numel() * share
    return ModelFlops(sizes[True], sizes[False], output.numel(), output.requires_grad, attention)


def _experts(model: Any) -> dict[str, int]:
    """Return how many separate experts there are, by the layer that has them."""
    places = {name[: match.end()] for name, _ in model.named_parameters() if (match := EXPERT.search(name))}
    return Counter(EXPERT.split(place)[0] for place in places)


def _attention(config: Any) -> dict[int, int]:
    heads = config.num_attention_heads
    key = value = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):
        key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    window = getattr(config, "sliding_window", None) or WHOLE
    if not getattr(config, "use_sliding_window", True):
        window = WHOLE
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    widths: Counter[int] = Counter()
    for kind in kinds:
        widths[window if kind == "sliding_attention" else WHOLE] += heads * (key + value)
    return dict(widths)


def peak_tflops(dtype: str, device: torch.device) -> float:
    """Return the peak of a device in 10^12 FLOP/s, by which model FLOPs utilization (MFU) is measured; 0 if it is unknown."""
    return known_tflops(torch.cuda.get_device_name(device)) if dtype == "bfloat16" and device.type == "cuda" else 0.0


def known_tflops(name: str) -> float:
    """Return the peak of a device by the longest entry that its name contains; 0 if there is none."""
    found = [known for known in PEAK_TFLOPS if re.search(rf"\b{known}\b", name)]
    return PEAK_TFLOPS[max(found, key=len)] if found else 0.0
