"""The extension class of a vLLM worker that loads weights during sampling although its model is small."""

from __future__ import annotations

from services.weights.receivers import double_buffer
from services.weights.receivers.gloo import WorkerExtension as UsualExtension

double_buffer.LEAST_BYTES = 0


class WorkerExtension(UsualExtension):
    """The usual class, in a process where the limit is 0."""
