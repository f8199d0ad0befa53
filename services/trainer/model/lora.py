"""Low-rank adapters: what is trained where `lora.rank` is above 0, and what others see of it.

Guarantees: the model's own weights are frozen and never written to; adapters are float32 whatever the model is, since their
steps are far smaller than what bfloat16 resolves; whoever asks for a weight by its Hugging Face name gets W + scale B A,
computed in float32 and rounded once, so that nobody else knows of adapters.

Hu et al. 2021, "LoRA", section 4.1: A is drawn and B is zero, so the adapted model begins as the model. Layers are peft's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from services.config import ConfigError
from services.config.training import Lora

ADAPTER = "default"
"""peft's name for the one adapter of a layer."""

MATRICES = tuple(f".lora_{matrix}.{ADAPTER}.weight" for matrix in "AB")
"""How names of adapters end, behind that of their layer: A [rank, in] and B [out, rank]."""

OWN = ".base_layer."
"""What peft puts into the names of an adapted layer's own weights."""


def attach(model: Any, options: Lora, path: str) -> None:
    """Freeze `model`, loaded from `path`, and give its linear layers adapters. Raises `ConfigError` for a target it lacks."""
    from peft import LoraConfig, inject_adapter_in_model

    layers = {name.rpartition(".")[2] for name, layer in model.base_model.named_modules() if isinstance(layer, nn.Linear)}
    unknown = sorted(set(options.targets) - layers)
    if unknown or not layers:
        raise ConfigError(
            f"lora.targets names {unknown}, and model.path = {path!r} has linear layers {sorted(layers)}: choose among them"
        )
    settings = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # pyright: ignore[reportArgumentType] - a factor like any other
        target_modules=options.targets or sorted(layers),
        base_model_name_or_path=path,
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(settings, model, ADAPTER)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()


class Unadapted:
    """An adapted policy, called as if it had no adapters: a frozen reference that costs no second model."""

    def __init__(self, policy: nn.Module) -> None:
        from peft.tuners.lora import LoraLayer

        self._policy = policy
        self._layers = [layer for layer in policy.modules() if isinstance(layer, LoraLayer)]

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """As the policy. Adapters are computed and count nothing: ZeRO-3 fetches weights in the order of earlier calls."""
        self._scale(0.0)
        try:
            return self._policy(*arguments)
        finally:
            self._scale(1.0)

    def _scale(self, factor: float) -> None:
        for layer in self._layers:
            layer.set_scale(ADAPTER, factor)


def sources(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names of the model's weights, as Hugging Face has them, and of the parameters each is made of: itself, or W, A and B."""
    known = set(names)
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        if name.endswith(MATRICES):
            continue
        layer = name.removesuffix(f"{OWN}weight")
        adapter = tuple(layer + matrix for matrix in MATRICES)
        found[name.replace(OWN, ".")] = (name, *adapter) if known.issuperset(adapter) else (name,)
    return found


@torch.no_grad()
def merged(parts: Sequence[Tensor], options: Lora) -> Tensor:
    """The weight made of `parts`, named by `sources`: a tensor of its own where there is an adapter, else the one part itself."""
    if len(parts) == 1:
        return parts[0].detach()
    weight, a, b = parts
    return torch.addmm(weight.float(), b, a, alpha=options.scale).to(weight.dtype)


def merged_state(state: Mapping[str, Tensor], options: Lora) -> dict[str, Tensor]:
    """The model's weights under their Hugging Face names, from those of the adapted model."""
    return {name: merged([state[part] for part in parts], options) for name, parts in sources(state).items()}


def save(model: Any, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters in `state` as peft does, for `PeftModel.from_pretrained`. Raises `OSError`."""
    from safetensors.torch import save_file

    folder.mkdir()
    model.peft_config[ADAPTER].save_pretrained(folder)
    adapters = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": value for name, value in state.items() if name.endswith(MATRICES)
    }
    save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
