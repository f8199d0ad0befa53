"""The extension class of a vLLM worker that does not load one of its weights, when told so."""

from __future__ import annotations

from services.weights.receivers.gloo import JoiningEngine
from services.weights.receivers.gloo import WorkerExtension as HonestExtension


class WorkerExtension(HonestExtension):
    """Loads nothing into the weight that it forgets."""

    def forget_weight(self, name: str) -> None:
        """Leave out a weight from now on; an empty name: none."""
        engine = self.weight_transfer_engine
        engine.load = lambda weights: JoiningEngine.load(engine, ((n, w) for n, w in weights if n != name))  # type: ignore
