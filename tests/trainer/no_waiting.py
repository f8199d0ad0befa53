"""Forbids operations that would make the host wait for a GPU, as far as they can be told on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READING = ("_local_scalar_dense", "is_nonzero", "equal")
"""The host reads a value."""
READING_ALL = (Tensor.tolist, Tensor.numpy, Tensor.cpu)
"""The host reads a tensor. On a CPU these are no operations."""
SIZED = ("nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_dim", "unique_consecutive")
"""The host has to know the size of the result."""
SENDING = ("lift_fresh",)
"""The host sends values, as in `torch.tensor(values, device=device)`, from memory that is not pinned."""
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


class Waited(AssertionError):
    """An operation would have waited for the device."""


class _NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name, given = func.overloadpacket.__name__, dict(kwargs or {})
        masked = name in INDEXING and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        repeats = name == "repeat_interleave" and given.get("output_size") is None
        if masked or repeats or name in (*READING, *SIZED, *SENDING):
            raise Waited(str(func))
        return func(*args, **given)


class _NoReading(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in READING_ALL:
            raise Waited(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise `Waited` for any operation inside that waits for a GPU, in forward and in backward passes."""
    with _NoReading(), _NoWaiting():
        yield
