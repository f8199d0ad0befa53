"""A trainer rank without a process group, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.runtime import atomic_folders
from services.trainer import ranks
from services.trainer.checkpoints.folder import Checkpoints, CheckpointWriter
from services.trainer.ranks import World


class LoneRank:
    """One rank without a process group, whose policy is a file; `meanwhile` is called while it is written."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.meanwhile: Callable[[], object] = lambda: None
        self.world, self.zero_stage = World(), 0
        self.module = SimpleNamespace(named_parameters=list)
        self.config = SimpleNamespace(run=SimpleNamespace(name="run"), model=SimpleNamespace(dtype="float32", path="tiny"))
        self.learning_rate = SimpleNamespace(state={}, continue_from=lambda state: None)
        patch.setattr(ranks, "gather", lambda value: [value])
        patch.setattr(ranks, "from_rank_0", lambda value: value)

    def save(self, folder: Path) -> list[str]:
        self.meanwhile()
        atomic_folders.write(folder / "random-0.pt", b"state")
        return ["random-0.pt"]

    def load(self, folder: Path) -> None:
        assert (folder / "random-0.pt").exists()

    def checkpoints(self, root: Path, fence: int, newest: list[int]) -> Checkpoints:
        found = Checkpoints(root, keep=2)
        found.owner = CheckpointWriter(fence, lambda: "" if newest[0] == fence else "superseded")
        return found
