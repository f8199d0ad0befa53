"""The extension class of a vLLM worker on a CPU that keeps its weights as one on a GPU does, and whose NCCL runs over gloo.

On a CPU, oneDNN repacks linear layers, which leaves their weight empty; here torch multiplies with the original weight.
"""

from __future__ import annotations

import hashlib

import torch
from vllm.model_executor.layers import utils

from services.weights.receivers.nccl import NcclWeightTransferEngine
from services.weights.receivers.patching import Patcher
from tests.weights.nccl.nccl_worker import WorkerExtension as WiredExtension


def leave(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Multiply with the layer's own weight."""
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


utils.dispatch_cpu_unquantized_gemm = leave


class PlainExtension(WiredExtension):
    """Methods that tests call."""

    def patcher(self) -> Patcher:
        engine = self.weight_transfer_engine
        assert isinstance(engine, NcclWeightTransferEngine)
        return engine.patcher

    def digests(self) -> dict[str, str]:
        """Return a hash of the bytes of each of the model's tensors."""
        tensors = dict(self.weight_transfer_engine.model.named_parameters())
        return {
            name: hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in tensors.items()
        }

    def takes_patches(self) -> bool:
        """Return whether this worker accepts a patch as the next transfer."""
        return self.patcher().able

    def mirrors(self) -> int:
        """Return the bytes of weights stored in this worker's host memory."""
        return sum(tensor.nbytes for tensor in self.weight_transfer_engine.mirror._tensors)

    def rot(self, name: str) -> None:
        """Flip a bit of every element of a tensor, as failing memory might."""
        with torch.no_grad():
            self.weight_transfer_engine.model.get_parameter(name).data.view(torch.int32).bitwise_xor_(1)

    def trust(self) -> None:
        """Let the worker accept patches again."""
        self.patcher()._distrusted = ""

    def lack_memory(self, lack: bool) -> None:
        """Run out of memory while placing the first chunk of a patch."""
        from services.weights.sparse.placement import Placement

        if lack:

            def fail(*_: object) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory")

            self.find, Placement.find = Placement.find, fail  # type: ignore[method-assign, assignment]
        else:
            Placement.find = self.find  # type: ignore[method-assign]

    def lose_writes(self, lose: bool) -> None:
        """Drop all writes of the next patches."""
        from services.weights.sparse.placement import Landing

        if lose:
            Landing.write = lambda self: None  # type: ignore[method-assign]
        else:
            Landing.write = lambda self: self.memory.__setitem__(self.places, self.new)  # type: ignore[method-assign]
