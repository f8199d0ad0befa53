"""Copies of rows to a device.

Guarantees: nothing waits for the kernels that the device still runs, so the next row is sent while the previous one computes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device`, for a GPU by way of pinned memory: only from there do copies not wait for it.

    Torch reuses the pinned memory only once the device has read it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fields_to_device(record: Any, device: torch.device) -> dict[str, Any]:
    """Return the fields of a dataclass by name: tensors, and what else can be copied to a device, on `device`."""
    found: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(record)}
    for name, value in found.items():
        if isinstance(value, Tensor):
            found[name] = to_device(value, device)
        elif hasattr(value, "to"):
            found[name] = value.to(device)
    return found
