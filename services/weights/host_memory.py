"""Weights in host memory, sent from where they lie.

Guarantees: a bucket whose weights lie in host memory as they do in the bucket is their own memory, and nothing is copied; any
other is a copy. Either way its bytes stay as they are until as many further buckets have been asked for as there are buffers, as
long as nobody trains.
DeepSpeed lays weights end to end at ZeRO stages 1 and 2; where it leaves them, `lay_end_to_end` does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch

from services.weights.collective import Bucket, TensorMeta, huge_pages, plan_buckets


def describe(name: str, weight: torch.Tensor) -> TensorMeta:
    """`weight` as a manifest has it; a partitioned one (ZeRO-3) with its whole shape."""
    return TensorMeta(name, str(weight.dtype).removeprefix("torch."), list(getattr(weight, "ds_shape", weight.shape)))


@torch.no_grad()
def lay_end_to_end(model: torch.nn.Module) -> None:
    """Move all parameters of `model` into one piece of host memory, in the order of their names. Views of them made before keep
    the old memory."""
    parameters = dict(model.named_parameters())
    for whole in plan_buckets((describe(name, weight) for name, weight in parameters.items()), sys.maxsize).buckets:
        memory = huge_pages(whole.nbytes)
        for name, place in whole.views(memory):
            place.copy_(parameters[name])
            parameters[name].data = place


def as_they_lie(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of weights as they come; if all are in host memory, those in one piece of it by address, and further names of tied
    weights last."""
    if any(weight.device.type != "cpu" for weight in weights.values()):
        return list(weights)
    pieces: dict[int, list[tuple[int, str]]] = {}  # by address of the piece
    again, seen = list[str](), set[int]()
    for name, weight in weights.items():
        if weight.data_ptr() in seen:
            again.append(name)
            continue
        seen.add(weight.data_ptr())
        pieces.setdefault(weight.untyped_storage().data_ptr(), []).append((weight.data_ptr(), name))
    return [name for piece in pieces.values() for _, name in sorted(piece)] + again


class HostBuckets:
    """Memory of buckets on their way."""

    def __init__(self, count: int, fleeting: bool) -> None:
        """`count` buffers to copy into; `fleeting` weights are gone when the next bucket is asked for."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * count
        self._fleeting = fleeting

    def memory(self, number: int, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """[nbytes] uint8, the bytes of bucket `number`."""
        own = None if self._fleeting else _in_place(bucket, tensors)
        if own is not None:
            return own
        place = number % len(self._buffers)
        if self._buffers[place].numel() < bucket.nbytes:
            self._buffers[place] = huge_pages(bucket.nbytes)
        for (_, view), tensor in zip(bucket.views(self._buffers[place]), tensors, strict=True):
            view.copy_(tensor)
        return self._buffers[place][: bucket.nbytes]


def _in_place(bucket: Bucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The bucket's bytes in the memory of `tensors`, or None if they lie otherwise."""
    storage, start = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor, offset in zip(tensors, bucket.offsets, strict=True):
        together = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == start + offset
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not together:
            return None
    return tensors[0].detach().view(-1).view(torch.uint8).as_strided((bucket.nbytes,), (1,))
