"""Checks whether a model holds the weights that it was given: its own loaders run again, and compare instead of copying.

vLLM's `compute_weight_checksums` hashes the tensors of a worker as they are after loading: fused (qkv, gate and up), sliced by
tensor parallelism, padded. A manifest has a checksum for each tensor of the checkpoint, and no checksum of one follows from the
other's. The loaders know how to get from one to the other, so they run again, and the bits themselves are compared.
Guarantees: nothing is written into the model. A weight whose tensor was repacked after loading cannot be compared, and is counted
(on CPUs all linear layers, of which vLLM keeps no tensor that Python could read).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class LoadedWeights:
    """What a comparison found."""

    differs: str  # name of the first weight that the model does not hold; empty: none
    compared: int  # weights
    total: int


class _NotComparable(Exception):
    """A loader would do more than copy."""


class _Comparison(TorchDispatchMode):
    """Compares what would be written into the tensors of a model; other operations run as usual."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._memories = {
            tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()] if tensor.numel()
        }
        self.compared, self.differs = False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if not func._schema.is_mutable or held is None or held.untyped_storage().data_ptr() not in self._memories:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.fill_.Scalar and args[1] == 0:  # padding
            return held
        if func is not torch.ops.aten.copy_.default:
            raise _NotComparable(str(func))
        given = args[1].to(device=held.device, dtype=held.dtype).expand_as(held)
        self.compared = True
        self.differs |= not torch.equal(_bits(held), _bits(given))
        return held


@torch.no_grad()
def compare(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
    """Return whether `model`, which has vLLM's `load_weights`, holds `weights`, which are named as in the checkpoint."""
    differs, compared, total = "", 0, 0
    for name, weight in weights:
        total += 1
        comparison = _Comparison(model)
        try:
            with comparison:
                model.load_weights([(name, weight)])
        except (_NotComparable, AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError):
            continue  # repacked: its loader finds no tensor of the shape it expects
        compared += comparison.compared
        if comparison.differs:
            differs = differs or name
    return LoadedWeights(differs, compared, total)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
