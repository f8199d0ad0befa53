"""The extension class of a vLLM worker that skips loading a given weight."""

from __future__ import annotations

from services.weights.receivers.gloo import JoiningEngine
from services.weights.receivers.gloo import WorkerExtension as HonestExtension


class WorkerExtension(HonestExtension):
    """Skips loading the given weight."""

    def forget_weight(self, name: str) -> None:
        """Skip a weight from now on, or none if the name is empty."""
        engine = self.weight_transfer_engine
        engine.load = lambda weights: JoiningEngine.load(engine, ((n, w) for n, w in weights if n != name))  # type: ignore
