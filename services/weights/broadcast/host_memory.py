"""Weights in host memory, sent without copying where possible.

Guarantees: if the weights of a bucket are laid out in host memory as they are in the bucket, the bucket uses their memory and
nothing is copied; otherwise it is a copy. Either way its bytes stay valid until as many further buckets have been requested as
there are buffers, provided that nobody trains.
DeepSpeed lays weights out contiguously at ZeRO stages 1 and 2; elsewhere `lay_end_to_end` does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch

from services.weights.buckets import Bucket, describe, huge_pages, plan_buckets


@torch.no_grad()
def lay_end_to_end(model: torch.nn.Module) -> None:
    """Move all parameters of `model` into one block of host memory, in the order of their names.

    Views of them created earlier keep the old memory.
    """
    parameters = dict(model.named_parameters())
    for whole in plan_buckets((describe(name, weight) for name, weight in parameters.items()), sys.maxsize).buckets:
        memory = huge_pages(whole.nbytes)
        for name, place in whole.views(memory):
            place.copy_(parameters[name])
            parameters[name].data = place


def as_they_lie(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of weights in the order in which to send them.

    If all are in host memory, weights in one block are sorted by address, and additional names of tied weights come last.
    """
    if any(weight.device.type != "cpu" for weight in weights.values()):
        return list(weights)
    pieces: dict[int, list[tuple[int, str]]] = {}  # by address of the memory block
    again, seen = list[str](), set[int]()
    for name, weight in weights.items():
        if weight.data_ptr() in seen:
            again.append(name)
            continue
        seen.add(weight.data_ptr())
        pieces.setdefault(weight.untyped_storage().data_ptr(), []).append((weight.data_ptr(), name))
    return [name for piece in pieces.values() for _, name in sorted(piece)] + again


class HostBuckets:
    """Memory for buckets in flight."""

    def __init__(self, count: int, fleeting: bool) -> None:
        """`count` is the number of buffers to copy into; `fleeting` weights are gone when the next bucket is requested."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * count
        self._fleeting = fleeting

    def memory(self, number: int, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [nbytes] uint8, the bytes of bucket `number`."""
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
    """Return the bucket's bytes in the memory of `tensors`, or None if they are laid out differently."""
    storage, start = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor, offset in zip(tensors, bucket.offsets, strict=True):
        together = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == start + offset
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not together:
            return None
    return tensors[0].detach().view(-1).view(torch.uint8).as_strided((bucket.nbytes,), (1,))
