"""Whatever fails on rank 0, all ranks run all gathers, so they stay in step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.weights.sender import SendFailed, WeightSender
from tests.support.harness import small_config

WEIGHTS = 5


class Gathering(WeightSender):
    """A rank whose weights are whole only inside `_whole`, each in its own bucket."""

    def __init__(self, folder: Path, rank: int, fails_at: int = WEIGHTS) -> None:
        parts = {f"w{i}": [torch.nn.Parameter(torch.full((4,), float(i)))] for i in range(WEIGHTS)}
        self.gathers, self.merges, self.fails_at = 0, 0, fails_at
        super().__init__(small_config(folder, None, "sync.backend=filesystem"), parts, self._merged_or_not, rank, 16)

    def _merged_or_not(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        self.merges += 1
        if self.merges - 1 == self.fails_at:
            raise torch.OutOfMemoryError("no memory for a merged weight")
        return weights[0].detach()

    @contextlib.contextmanager
    def _whole(self, weights: Any) -> Iterator[None]:
        self.gathers += 1
        yield


@pytest.mark.parametrize("fails_at", range(WEIGHTS))
def test_all_weights_are_gathered_after_a_merge_failed(tmp_path: Path, fails_at: int) -> None:
    sender = Gathering(tmp_path, 0, fails_at)
    sender.open()
    with pytest.raises(SendFailed, match="no memory for a merged weight"):
        sender.send()
    assert sender.gathers == WEIGHTS
    sender.open()
    sender.send()
    assert sender.gathers == 2 * WEIGHTS


def test_only_the_sender_merges(tmp_path: Path) -> None:
    other = Gathering(tmp_path, 1)
    other.send()
    assert (other.gathers, other.merges) == (WEIGHTS, 0)
