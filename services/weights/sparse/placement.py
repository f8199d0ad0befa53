"""Learns from a model's own loaders where it keeps each element of a checkpoint, and changes elements there.

vLLM's loaders fuse tensors (qkv, gate and up) and slice them for tensor parallelism. They run once over tensors without memory
(torch's meta device): wherever a loader would copy a view of one into a tensor of the model, offset and strides of both views say
which element goes where. So what changed can be written in place, without the other elements and without the host.
Guarantees: nothing is written while learning; a model whose loaders do anything but copy views raises `NotPlaceable`; `find`
changes nothing either, and reports elements that do not have the bits they should have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.weights.collective import TensorMeta
from services.weights.sparse.changes import bits

_WIDENED = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}
"""What a loader may convert, because every number has exactly one image (a NaN that has another is refused as a difference).
`model.fp32_head` keeps a head in float32.
"""


class NotPlaceable(Exception):
    """The model does not keep its weights as the checkpoint has them. The message says why."""


@dataclass(frozen=True)
class Region:
    """A view of a checkpoint's tensor, and the view of a model's tensor that it is copied into."""

    memory: torch.Tensor  # [elements] of the model's tensor, flat
    dtype: torch.dtype  # of the checkpoint's tensor
    offset: int  # of the first element, in the checkpoint's tensor
    place: int  # of the first element, in `memory`
    dims: tuple[tuple[int, int, int], ...]  # size, stride in the checkpoint's tensor, descending, and stride in `memory`

    def locate(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of `positions`, [n] int64 in the flattened tensor, are inside, [n] bool, and where they are in `memory`.

        The strides descend and their extents do not overlap, so dividing by one after the other finds the coordinates.
        """
        rest = positions - self.offset
        inside = rest >= 0
        place = torch.full_like(positions, self.place)
        for size, stride, step in self.dims:
            coordinate = rest // stride
            inside &= coordinate < size
            place += coordinate * step
            rest = rest - coordinate * stride
        inside &= rest == 0
        return inside, place[inside]

    def held(self, given: torch.Tensor) -> torch.Tensor:
        """Return the bits that the model has for elements of the checkpoint, `given` as bytes."""
        return bits(given.view(self.dtype).to(self.memory.dtype))


@dataclass(frozen=True)
class Landing:
    """Elements of a model to be changed."""

    memory: torch.Tensor  # bits, flat
    places: torch.Tensor  # [n], int32 where that suffices
    new: torch.Tensor  # [n] bits

    def write(self) -> None:
        """Change them."""
        self.memory[self.places] = self.new

    def written(self) -> torch.Tensor:
        """Return whether all are as they should be, a bool on the device."""
        return (self.memory[self.places] == self.new).all()


class Placement:
    """Where a model keeps the tensors of a manifest."""

    def __init__(self, regions: Sequence[Sequence[Region]]) -> None:
        """`regions` of each tensor."""
        self._regions = regions

    def find(
        self, tensor: int, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> tuple[list[Landing], list[torch.Tensor]]:
        """Return the model's elements for `positions` of a tensor, and for each run of them, on the device, whether it has `old`.

        `old` and `new` are bytes, [n * itemsize] uint8.
        """
        found: list[Landing] = []
        right: list[torch.Tensor] = []
        for region in self._regions[tensor]:
            inside, places = region.locate(positions)
            memory = bits(region.memory)
            right.append((memory[places] == region.held(old)[inside]).all())
            if memory.numel() < 2**31:
                places = places.to(torch.int32)
            found.append(Landing(memory, places, region.held(new)[inside]))
        return found, right


class _Tracing(TorchDispatchMode):
    """Records what would be copied into the tensors of a model, without copying it."""

    def __init__(self, model: torch.nn.Module, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()]
        self._memories = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.device.type != "meta"}
        self._given = {tensor.untyped_storage()._cdata: i for i, tensor in enumerate(given)}
        self.regions: list[list[Region]] = [[] for _ in self._given]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if not func._schema.is_mutable or held is None or held.device.type == "meta" or not self._of_model(held):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.fill_.Scalar and args[1] == 0:  # padding
            return held
        if func is not torch.ops.aten.copy_.default:
            raise NotPlaceable(f"a loader does {func}")
        given = args[1]
        source = self._given.get(given.untyped_storage()._cdata) if given.device.type == "meta" else None
        if source is None:
            raise NotPlaceable("a loader copies something that it has computed")
        self.regions[source].append(_region(given.expand_as(held), held))
        return held

    def _of_model(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memories


@torch.no_grad()
def trace(model: Any, tensors: Sequence[TensorMeta], aliases: Mapping[str, str]) -> Placement:
    """Return where `model`, which has vLLM's `load_weights`, keeps `tensors`. `aliases`: as in `WeightManifest`.

    Raises `NotPlaceable`.
    """
    named = {meta.name: torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta") for meta in tensors}
    tracing = _Tracing(model, named.values())
    weights = [*named.items(), *((name, named[source]) for name, source in aliases.items())]
    try:
        with tracing:
            model.load_weights(weights)
    except NotPlaceable:
        raise
    except Exception as error:  # whatever a loader raises that finds no memory, or a tensor of another shape than it expects
        raise NotPlaceable(f"a loader does more than copy: {type(error).__name__}: {error}") from error
    return Placement(tracing.regions)


def _region(given: torch.Tensor, held: torch.Tensor) -> Region:
    """Return the region of two views of the same shape. Raises `NotPlaceable`."""
    if given.dtype != held.dtype and (given.dtype, held.dtype) not in _WIDENED:
        raise NotPlaceable(f"a loader converts {given.dtype} to {held.dtype}")
    dims = [dim for dim in zip(given.shape, given.stride(), held.stride(), strict=True) if dim[0] != 1]
    dims.sort(key=lambda dim: -dim[1])
    extent = 1  # elements spanned by the dimensions after the current one
    for size, stride, _ in reversed(dims):
        if stride < extent:
            raise NotPlaceable("a loader copies an element twice")
        extent += (size - 1) * stride
    memory = torch.empty(0, dtype=held.dtype, device=held.device).set_(held.untyped_storage())  # type: ignore[call-overload]
    return Region(memory, given.dtype, int(given.storage_offset()), int(held.storage_offset()), tuple(dims))
