"""When patches are sent, and that ranks stay in step despite failures.

Several senders run as ranks in threads, with a transport that records.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from services.config import ConfigError
from services.weights.collective import Deadline, Gathered, WeightManifest
from services.weights.sender import SendFailed
from services.weights.sparse import sender as senders
from services.weights.sparse.encoder import ChangeEncoder
from services.weights.sparse.patch import Patch
from services.weights.sparse.sender import SparseWeightSender
from services.weights.versions.broadcast import Heading
from tests.support.models.tiny_vllm import make_config

RANKS = 3


class Recording:
    """A transport whose members accept everything."""

    backend, ahead = "nccl", False

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, list[int]]] = []  # kind, version, bytes of each rank's part or of each bucket
        self.refusing: list[int] = []
        self.fails = False

    def _maybe_fail(self) -> None:
        if self.fails:
            raise RuntimeError("a member is gone")

    def send(self, gathered: Gathered, manifest: WeightManifest, deadline: Deadline, heading: Heading) -> None:
        self._maybe_fail()
        self.sent.append(("whole", heading.version, [bucket.nbytes for bucket, _ in gathered]))

    def send_patch(self, patch: Patch, parts: Iterator[torch.Tensor], heading: Heading, deadline: Deadline) -> None:
        self.sent.append(("patch", heading.version, []))
        for part in parts:
            self._maybe_fail()
            self.sent[-1][2].append(part.numel())
        assert sum(self.sent[-1][2]) == patch.nbytes

    def unpatchable(self) -> list[int]:
        return self.refusing

    def close(self) -> None: ...


class Trainer:
    """Ranks that hold the same weights."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        first = {f"w{i}": torch.nn.Parameter(torch.randn(40, 50).bfloat16()) for i in range(2 * RANKS)}
        self.weights = [first, *({n: torch.nn.Parameter(w.detach().clone()) for n, w in first.items()} for _ in range(RANKS - 1))]
        self.transport = Recording()
        self._barrier, self._said = threading.Barrier(RANKS, timeout=60), list[Any]([None] * RANKS)
        self._pipes: list[Queue[torch.Tensor]] = [Queue() for _ in range(RANKS)]
        config = make_config(folder)
        config = config.model_copy(
            update={"sync": config.sync.model_copy(update={"backend": "nccl", "encoding": "sparse", "transfer_deadline_s": 5.0})}
        )
        self.senders = [
            SparseWeightSender(
                config, {name: [w] for name, w in self.weights[rank].items()}, lambda parts: parts[0].detach(), rank, RANKS,
                lambda value, rank=rank: self._gather(rank, value), self._relay, 1 << 12,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        for each in self.senders:
            each._transport = self.transport  # type: ignore[assignment]
        self.version = -1

    def _gather(self, rank: int, value: Any) -> list[Any]:
        self._said[rank] = value
        self._barrier.wait()
        values = list(self._said)
        self._barrier.wait()
        return values

    def _relay(self, data: torch.Tensor | None, nbytes: int, source: int) -> torch.Tensor | None:
        if data is not None:
            self._pipes[source].put(data)
            return None
        got = self._pipes[source].get(timeout=60)
        assert got.numel() == nbytes
        return got

    def train(self, share: float = 0.02) -> None:
        for name in self.weights[0]:
            change = torch.randn(40, 50).bfloat16() * (torch.rand(40, 50) < share)
            for weights in self.weights:
                weights[name].data.add_(change)

    def send(self, held: int | None = None, share: float = 0.02, newcomers: bool = False) -> str:
        """Train, and send to members that hold `held` or the last version, or only to newcomers; return what was sent."""
        self.version += 1
        self.train(share)
        lead = self.senders[0]
        lead.label(self.version, 9)
        lead.members_hold(None if newcomers else self.version - 1 if held is None else held)
        with ThreadPoolExecutor(RANKS) as pool:
            done = [pool.submit(each.send) for each in self.senders]
        for each in done[1:]:
            each.result()
        done[0].result()
        assert all(pipe.empty() for pipe in self._pipes)
        kind, version, _ = self.transport.sent[-1]
        assert version == self.version
        assert lead.sent["delta"] == (kind == "patch")
        return kind


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_all_weights_are_sent_first_and_each_ranks_changes_then(trainer: Trainer) -> None:
    assert [trainer.send() for _ in range(4)] == ["whole", "patch", "patch", "patch"]
    assert all(len(parts) == RANKS for kind, _, parts in trainer.transport.sent if kind == "patch")
    assert 0.01 < trainer.senders[0].sent["changed"] < 0.03
    assert trainer.senders[0].sent["share"] < 0.2
    assert trainer.send(share=0.0) == "patch", "nothing changed"
    assert trainer.transport.sent[-1][2] == []


def test_members_on_another_version_get_all_weights(trainer: Trainer) -> None:
    assert [trainer.send(), trainer.send(held=7), trainer.send()] == ["whole", "whole", "patch"]
    trainer.transport.refusing = [2]
    assert [trainer.send(), trainer.send()] == ["whole", "whole"]
    trainer.transport.refusing = []
    assert trainer.send() == "patch"
    trainer.senders[0].members_hold(None)
    trainer.senders[0].close_group()
    assert trainer.send() == "whole"


def test_a_patch_that_saves_nothing_is_not_sent(trainer: Trainer) -> None:
    assert [trainer.send(), trainer.send(share=1.0), trainer.send()] == ["whole", "whole", "patch"]


def test_a_broken_send_leaves_no_rank_waiting(trainer: Trainer) -> None:
    assert [trainer.send(), trainer.send()] == ["whole", "patch"]
    trainer.transport.fails = True
    for _ in range(2):  # the first fails in a patch, the second in a transfer of all weights
        with pytest.raises(SendFailed, match="a member is gone"):
            trainer.send()
    trainer.transport.fails = False
    assert [trainer.send(), trainer.send()] == ["whole", "patch"]


@pytest.mark.parametrize("method", ["encode", "load"])
def test_a_rank_out_of_memory_causes_full_transfers(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    assert trainer.send() == "whole"
    honest = getattr(ChangeEncoder, method)

    def failing(self: ChangeEncoder) -> Any:
        if self._rank == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return honest(self)

    monkeypatch.setattr(ChangeEncoder, method, failing)
    assert trainer.send(held=5 if method == "load" else None) == "whole"
    assert trainer.send() == "whole"
    monkeypatch.undo()
    assert [trainer.send(), trainer.send()] == (["whole", "patch"] if method == "load" else ["patch", "patch"])


def test_all_weights_are_sent_periodically(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "WHOLE_EVERY", 4)
    assert [trainer.send() for _ in range(9)] == ["whole", *["patch"] * 3, "whole", *["patch"] * 3, "whole"]


def test_newcomers_do_not_delay_the_periodic_full_transfer(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "WHOLE_EVERY", 4)
    assert trainer.send() == "whole"
    for _ in range(3):
        assert trainer.send() == "patch"
        assert trainer.send(newcomers=True) == "whole"
    assert [trainer.send(), trainer.send()] == ["whole", "patch"]


def test_adapters_are_rejected(tmp_path: Path) -> None:
    parts = {"w": [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(3)]}
    with pytest.raises(ConfigError, match="sends no adapters"):
        SparseWeightSender(make_config(tmp_path), parts, lambda w: w[0], 0, 1, lambda v: [v], lambda *_: None)
