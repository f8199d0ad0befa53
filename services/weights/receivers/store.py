"""Weights into a vLLM worker from a store of versions: fetched and checked beside generation, applied in the pause.

Guarantees: those of `StagingEngine`; the copy in host memory that deltas are applied to outlives the group, so a worker that
missed rounds fetches only the deltas it lacks.
"""

from __future__ import annotations

from typing import Any

import torch

from services.weights.collective import Deadline
from services.weights.receivers.gloo import JoinInfo, StagingEngine
from services.weights.versions.mirror import WeightMirror
from services.weights.versions.reader import VersionReader


class StoreWeightTransferEngine(StagingEngine):
    """Fetches versions; `host` is the place of the trainer's versions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mirror = WeightMirror()

    def connect(self, info: JoinInfo, rank: int) -> VersionReader:
        """Look into the store."""
        return VersionReader(info.host, self._mirror)

    def take(self, connection: VersionReader, deadline: Deadline, version: int) -> list[tuple[str, torch.Tensor]]:
        """Fetch what leads to the version."""
        weights = connection.take(deadline, version)
        self.fetched_bytes = connection.fetched.nbytes
        return weights
