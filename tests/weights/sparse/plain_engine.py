"""A receiver over NCCL outside vLLM: its engine around a model of plain tensors. The NCCL library is replaced (nccl_wire.py).

`python -m tests.weights.sparse.plain_engine HOST PORT RANK SIZE` joins a group that sends `weights()`, receives one transfer of
all of them, and kills itself in the middle of the next.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from services.weights.collective import BUCKET_BYTES
from services.weights.receivers import OWNER
from services.weights.receivers.gloo import JoinInfo, ReceiveInfo
from services.weights.receivers.nccl import NcclWeightTransferEngine

LIMIT_S = 20.0
CHUNK_BYTES = 256
"""Chunk size for tests in which a member dies, so that a patch has many chunks."""


class PlainModel(torch.nn.Module):
    """Tensors under a checkpoint's names; a tied one is stored twice."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for i, tensor in enumerate(self.tensors.values()):
            self.register_buffer(f"tensor{i}", tensor)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.tensors[name].copy_(weight)


class PlainEngine(NcclWeightTransferEngine):
    """The one worker of a generator."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(quantization=None))
        with mock.patch.dict(os.environ, {OWNER: str(os.getppid())}):  # a receiver exits with the process that started it
            super().__init__(None, config, torch.device("cpu"), PlainModel(weights))

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Load weights inside this block."""
        self.whole = False
        yield
        self.whole = True

    def join(self, host: str, port: int, rank: int, size: int, limit_s: float = LIMIT_S) -> None:
        """Join a group and wait until it is complete."""
        self.init_transfer_engine(JoinInfo(host, port, rank, size, BUCKET_BYTES, limit_s))
        assert self._joining is not None
        self._joining.result(limit_s)

    def take(self, limit_s: float = LIMIT_S) -> None:
        """Receive one transfer."""
        self.receive_weights(ReceiveInfo(limit_s))

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """Return the weights."""
        model: Any = self.model
        return model.tensors


def weights() -> dict[str, torch.Tensor]:
    """Return weights for a test without a model."""
    torch.manual_seed(1)
    return {f"w{i}": torch.randn(64, 64 + i).bfloat16() for i in range(6)}


def main() -> None:
    """Receive, and die in mid-transfer."""
    from services.weights.receivers.patching import Patcher
    from services.weights.sparse import patch
    from tests.weights.nccl.nccl_wire import wired

    host, port, rank, size = sys.argv[1], *map(int, sys.argv[2:])
    patch.CHUNK_BYTES = CHUNK_BYTES
    with wired():
        engine = PlainEngine(weights())
        engine.join(host, port, rank, size)
        engine.take()
        print("whole", flush=True)
        honest = Patcher._of_chunk

        def dying(self: Patcher, *given: Any) -> Any:
            honest(self, *given)
            os.kill(os.getpid(), signal.SIGKILL)

        Patcher._of_chunk = dying  # type: ignore[method-assign]
        engine.take()


if __name__ == "__main__":
    main()
