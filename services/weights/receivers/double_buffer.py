"""A second copy of a model's layers: new weights are loaded into it while the engine samples, and in the pause it is swapped with
the model's own layers.

On a CPU vLLM repacks every linear layer for oneDNN when weights are loaded, which takes longer than copying them. A copy of the
modules lets vLLM's own loaders do that while the engine samples.
Guarantees: the model does not change before `exchange`, which only swaps references. Models whose layers derive anything
else from their weights are not copied.
Cost: while it is filled, a second copy of the packed weights; afterwards only of what is not packed, embeddings and norms.
"""

from __future__ import annotations

import threading
from types import MethodType
from typing import Any

import structlog
import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

from services.weights.receivers.patching import refuse
from services.weights.sparse.placement import NotPlaceable

log = structlog.get_logger()

WRAPPER = "online_process_loader"  # name of the function that vLLM wraps loaders in while it reloads
PACKED = "cpu_linear"  # attribute of a layer: the function that multiplies by its packed weights

LEAST_BYTES = 16 << 20
"""Size of models below which packing takes less than what vLLM's loaders do in Python, where they would compete with sampling."""

Weights = list[tuple[str, torch.Tensor]]
"""Named as in the checkpoint."""


def double_buffer(model: Any, model_config: Any) -> DoubleBuffer | None:
    """Return a second copy of a model on a CPU; None on other devices, and for models that are better reloaded in the pause."""
    if any(tensor.device.type != "cpu" for tensor in model.parameters()) or not model_config.enforce_eager:
        return None
    if _nbytes(model) < LEAST_BYTES:
        return None
    try:
        refuse(model, getattr(model_config, "quantization", None) is not None)
    except NotPlaceable as error:
        log.info("weights are packed in the pause and not before it", reason=str(error))
        return None
    return DoubleBuffer(model, model_config)


class DoubleBuffer:
    """The second copy of one model's layers."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._config = model, model_config
        self._copy: Any = None
        self._holds: Weights | None = None
        self._busy = threading.Lock()  # an abandoned transfer may still be filling it

    @torch.no_grad()
    def fill(self, weights: Weights) -> None:
        """Load weights into the copy. Raises whatever the model's loaders raise."""
        with self._busy:
            self._holds = None
            if self._copy is None:
                self._copy = _copy_of(self._model, {}, {})
            initialize_layerwise_reload(self._copy)
            try:
                self._copy.load_weights(weights)
            finally:
                finalize_layerwise_reload(self._copy, self._config)
            self._holds = weights

    def exchange(self, weights: Weights) -> bool:
        """Give the copy's layers to the model if it was last filled with `weights`, the same list. Return whether it was."""
        with self._busy:
            if self._holds is not weights:
                return False
            self._holds = None
            others = dict((*self._copy.named_parameters(), *self._copy.named_buffers()))
            for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):  # tied tensors once
                tensor.data, others[name].data = others[name].data, tensor.data
            for module, other in zip(self._model.modules(), self._copy.modules(), strict=True):
                if PACKED in other.__dict__:
                    setattr(module, PACKED, other.__dict__.pop(PACKED))
            return True


def _nbytes(model: Any) -> int:
    """Return the size of a model's tensors as they are loaded, since packed ones are empty afterwards."""
    shapes = [get_layerwise_info(module).restore_metadata for module in model.modules()]
    return sum(tensor.nbytes for tables in shapes for table in tables for tensor in table.values())


def _copy_of(module: Any, modules: dict[int, Any], tensors: dict[int, Any]) -> Any:
    """Return a copy of a module that shares everything except its modules and tensors.

    `modules`, `tensors`: copies by original.
    """
    if id(module) in modules:
        return modules[id(module)]
    copy = object.__new__(type(module))
    modules[id(module)] = copy
    copy.__dict__.update({name: value for name, value in module.__dict__.items() if name != PACKED})
    copy._parameters = {name: _clone(tensor, tensors) for name, tensor in module._parameters.items()}
    copy._buffers = {name: _clone(tensor, tensors) for name, tensor in module._buffers.items()}
    copy._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    copy._modules = {
        name: None if child is None else _copy_of(child, modules, tensors) for name, child in module._modules.items()
    }
    info, known = get_layerwise_info(copy), get_layerwise_info(module)
    params, buffers = known.restore_metadata
    info.restore_metadata = (_shapes_of(params, module, copy), _shapes_of(buffers, module, copy))
    info.restore_device = known.restore_device
    return copy


def _shapes_of(tensors: dict[str, torch.Tensor], module: Any, copy: Any) -> dict[str, Any]:
    """Return tensors without memory, such as a reload begins with, whose loaders are those of `copy` instead of `module`.

    vLLM's wrappers count what is loaded into the module that they were made for, and stay on its tensors after a reload.
    """
    own: dict[str, Any] = {name: to_meta_tensor(tensor) for name, tensor in tensors.items()}
    for tensor in own.values():
        for name, value in list(tensor.__dict__.items()):
            while getattr(value, "__name__", "") == WRAPPER:
                value = value.__wrapped__
            if isinstance(value, MethodType) and value.__self__ in (module, layer_ref_sentinel):
                value = MethodType(value.__func__, copy)
            tensor.__dict__[name] = value
    return own


def _clone(tensor: torch.Tensor | None, tensors: dict[int, Any]) -> Any:
    if tensor is None:
        return None
    if id(tensor) not in tensors:
        clone: Any = tensor.detach().clone()
        clone.__class__ = tensor.__class__  # as vLLM does for its copies on the meta device
        clone.__dict__ = tensor.__dict__.copy()
        tensors[id(tensor)] = clone
    return tensors[id(tensor)]
