"""The extension class of a vLLM worker that skips loading a given weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from services.weights.receivers.gloo import JoiningEngine, StagingEngine
from tests.weights.buffered_worker import WorkerExtension as HonestExtension


class WorkerExtension(HonestExtension):
    """Skips loading the given weight."""

    def forget_weight(self, name: str, buffered: bool) -> None:
        """Skip a weight from now on, or none if the name is empty. `buffered`: whether weights are loaded before the pause."""
        engine = self.weight_transfer_engine
        assert isinstance(engine, StagingEngine)
        engine.load = lambda weights: JoiningEngine.load(engine, _without(name, weights))  # type: ignore[method-assign]
        self._buffer = getattr(self, "_buffer", engine.buffer)
        assert self._buffer is not None
        if (copy := self._buffer._copy) is not None:
            copy.load_weights = lambda weights: type(copy).load_weights(copy, _without(name, weights))
        engine.buffer = self._buffer if buffered else None


def _without(name: str, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    return ((n, w) for n, w in weights if n != name)
