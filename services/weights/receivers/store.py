"""Weights into a vLLM worker from a store of versions: fetched and checked beside generation, applied in the pause.

Guarantees: those of `StagingEngine`; the copy in host memory that deltas are applied to outlives the group, so a worker that
missed rounds fetches only the deltas it lacks.
"""

from __future__ import annotations

import torch

from services.weights.collective import Deadline
from services.weights.receivers.gloo import JoinInfo, StagingEngine
from services.weights.versions.reader import VersionReader


class StoreWeightTransferEngine(StagingEngine):
    """Fetches versions; `host` is the place of the trainer's versions."""

    def connect(self, info: JoinInfo, rank: int) -> VersionReader:
        """Check that the store can be read."""
        return VersionReader(info.host, self.mirror)

    def take(self, connection: VersionReader, deadline: Deadline, version: int) -> list[tuple[str, torch.Tensor]]:
        """Fetch the objects that lead to the version."""
        weights = connection.take(deadline, version)
        self.fetched_bytes = connection.fetched.nbytes
        return weights
