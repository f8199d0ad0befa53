"""Low-rank adapters: what is trained when `lora.rank` is above 0, and how they look to the rest of the system.

Guarantees: the model's own weights are frozen and never written to; adapters are float32 whatever the model's dtype, since their
steps are far smaller than what bfloat16 resolves; a weight requested by its Hugging Face name is W + scale B A, computed in
float32 and rounded once, so the rest of the system does not know about adapters.

Hu et al. 2021, "LoRA", section 4.1: A is random and B is zero, so the adapted model starts out equal to the model. The layers are
peft's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from services.config import ConfigError
from services.config.training import Lora
from services.trainer.model import support
from services.trainer.model.attention.packing import RowTokens
from services.weights.merge import merged
from services.weights.transport import TrainedWeights

ADAPTER = "default"
"""peft's name for the only adapter of a layer."""

MATRICES = tuple(f".lora_{matrix}.{ADAPTER}.weight" for matrix in "AB")
"""Suffixes of the names of adapters, after the name of their layer: A [rank, in] and B [out, rank]."""

OWN = ".base_layer."
"""Part that peft inserts into the names of an adapted layer's own weights."""


def attach(model: Any, options: Lora, path: str) -> None:
    """Freeze `model`, loaded from `path`, and add adapters to its linear layers. Raises `ConfigError` for a target it does not
    have.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = {name.rpartition(".")[2] for name, layer in support.backbone(model).named_modules() if isinstance(layer, nn.Linear)}
    if not layers:
        raise ConfigError(
            f"lora.rank = {options.rank}: model.path = {path!r} has no linear layers that adapters could be added to: "
            "set lora.rank = 0, or use another model"
        )
    if unknown := sorted(set(options.targets) - layers):
        raise ConfigError(
            f"lora.targets names {unknown}, which model.path = {path!r} lacks: choose among its linear layers {sorted(layers)}"
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
    """Calls an adapted policy as if it had no adapters: a frozen reference that needs no second model."""

    def __init__(self, policy: nn.Module) -> None:
        from peft.tuners.lora import LoraLayer

        self._policy = policy
        self._layers = [layer for layer in policy.modules() if isinstance(layer, LoraLayer)]

    def __call__(self, row: RowTokens) -> tuple[Tensor, Tensor]:
        """Call the policy with adapters scaled to zero. They are still computed: ZeRO-3 fetches weights in the order of earlier
        calls.
        """
        self._scale(0.0)
        try:
            return self._policy(row)
        finally:
            self._scale(1.0)

    def _scale(self, factor: float) -> None:
        for layer in self._layers:
            layer.set_scale(ADAPTER, factor)


def sources(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Map each Hugging Face weight name to the parameters the weight is made of: itself, or W, A and B."""
    known = set(names)
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        if name.endswith(MATRICES):
            continue
        layer = name.removesuffix(f"{OWN}weight")
        adapter = tuple(layer + matrix for matrix in MATRICES)
        found[name.replace(OWN, ".")] = (name, *adapter) if known.issuperset(adapter) else (name,)
    return found


def trained_weights(model: nn.Module, options: Lora) -> TrainedWeights:
    """Return what a trainer of `model` sends: its parameters, and the weights that they make up."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return TrainedWeights(parameters, sources(parameters), options.scale if options.rank else 0.0)


def merged_state(state: Mapping[str, Tensor], options: Lora) -> dict[str, Tensor]:
    """Return the model's weights under their Hugging Face names, from those of the adapted model."""
    scale = options.scale if options.rank else 0.0
    return {name: merged([state[part] for part in parts], scale) for name, parts in sources(state).items()}


def save(model: Any, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters in `state` in peft's format, for `PeftModel.from_pretrained`. Raises `OSError` or `SafetensorError`."""
    from safetensors.torch import save_file

    folder.mkdir()
    settings = copy.copy(model.peft_config[ADAPTER])
    settings.target_modules = sorted(settings.target_modules)  # a set, whose order differs between processes
    settings.save_pretrained(folder)
    adapters = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": value for name, value in state.items() if name.endswith(MATRICES)
    }
    save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
