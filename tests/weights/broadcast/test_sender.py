"""Whatever fails on rank 0, all ranks run all gathers, so they stay in step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.weights.broadcast.sender import BroadcastSender
from services.weights.buckets import Gathered
from services.weights.deadline import Deadline
from services.weights.transport import SendFailed, TrainedWeights
from tests.support.harness import small_config

WEIGHTS = 5


class Gathering(BroadcastSender):
    """A rank whose weights are whole only while they are gathered, each in its own bucket, and whose group is this process."""

    backend = "none"

    def __init__(self, folder: Path, rank: int, fails_at: int = WEIGHTS) -> None:
        parameters = {f"w{i}": torch.nn.Parameter(torch.full((4,), float(i))) for i in range(WEIGHTS)}
        self.gathers, self.merges, self.fails_at = 0, 0, fails_at
        config = small_config(folder, None, "sync.backend=gloo", "sync.host=127.0.0.1")
        weights = TrainedWeights(parameters, {name: [name] for name in parameters})
        super().__init__(config, weights, rank, 2, lambda value: [value], 16)

    def form(self, store: Any, world_size: int) -> object:
        return store

    def broadcast(self, group: Any, gathered: Gathered, deadline: Deadline) -> None:
        for _ in gathered:
            pass

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        self.merges += 1
        if self.merges - 1 == self.fails_at:
            raise torch.OutOfMemoryError("no memory for a merged weight")
        return parts[0].detach()

    @contextlib.contextmanager
    def whole(self, weights: Any) -> Iterator[None]:
        self.gathers += 1
        yield

    def group(self) -> None:
        self.open(1)
        self.connect(1)


@pytest.mark.parametrize("fails_at", range(WEIGHTS))
def test_all_weights_are_gathered_after_a_merge_failed(tmp_path: Path, fails_at: int) -> None:
    sender = Gathering(tmp_path, 0, fails_at)
    sender.group()
    with pytest.raises(SendFailed, match="no memory for a merged weight"):
        sender.send(0, 1)
    assert sender.gathers == WEIGHTS
    sender.group()
    sender.send(0, 1)
    assert sender.gathers == 2 * WEIGHTS


def test_only_the_sender_merges(tmp_path: Path) -> None:
    other = Gathering(tmp_path, 1)
    other.send(0, 1)
    assert (other.gathers, other.merges) == (WEIGHTS, 0)
