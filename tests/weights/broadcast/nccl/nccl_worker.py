"""The extension class of a vLLM worker whose NCCL runs over gloo (nccl_wire.py), for as long as the worker lives."""

from __future__ import annotations

from services.weights.vllm_worker import WorkerExtension as WorkerExtension
from tests.weights.broadcast.nccl.nccl_wire import wired

_wired = wired()
_wired.__enter__()
