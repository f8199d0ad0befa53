"""Copies to a GPU begin in pinned memory, from where they do not wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.model.attention.packing import Packing, to_device
from services.trainer.step.batches import PackedRow

GPU = torch.device("cuda", 0)
ROW_TENSORS = (
    "input_ids", "positions", "predictors", "targets", "behaviour", "advantages", "weights", "sample_of_token", "counted",
)  # fmt: skip


@pytest.fixture
def row() -> PackedRow:
    tensors: Any = {name: torch.arange(3) for name in ROW_TENSORS}
    return PackedRow(samples=(("a.1", 0),), segments=(0,), packing=Packing.of([3]), **tensors)


@pytest.fixture
def copies(row: PackedRow, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Return the copies to a GPU, which stay where they are here: from pinned memory or not, and waiting or not."""
    pinned: list[Tensor] = []  # itself, so that no other tensor gets its identity
    made: list[tuple[bool, bool]] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        assert device == GPU
        made.append((any(tensor is one for one in pinned), not non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    return made


def test_a_row_is_sent_to_a_gpu_without_waiting_for_it(row: PackedRow, copies: list[tuple[bool, bool]]) -> None:
    sent = row.to(GPU)
    assert len(copies) == len(ROW_TENSORS) + 10, "the tensors of the packing are sent too"
    assert set(copies) == {(True, False)}
    assert sent.samples == row.samples
    assert torch.equal(sent.packing.shared.slots, row.packing.shared.slots)


def test_on_a_cpu_nothing_is_copied(row: PackedRow) -> None:
    same = row.to(torch.device("cpu"))
    assert all(getattr(same, name) is getattr(row, name) for name in ROW_TENSORS)
    assert to_device(row.targets, torch.device("cpu")) is row.targets
