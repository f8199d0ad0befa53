"""Writes changes into the tensors that vLLM samples with, those of an unquantized model, on their device.

Guarantees: a patch is applied to exactly the bits it was made from, or not at all: its version is compared, every chunk has a
checksum, and every element that it changes is compared with the old bits it names before the first one is written. What was
written is read back. A model that vLLM keeps in another form than its checkpoint, or derives anything from, is refused, with the
reason; such members take whole transfers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import structlog
import torch
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from services.weights.checksums import WeightChanged, checksums
from services.weights.collective import WeightManifest
from services.weights.sparse.patch import Patch, PatchRow, decode_row
from services.weights.sparse.placement import Landing, NotPlaceable, Placement, trace
from services.weights.versions.broadcast import Heading
from services.weights.versions.mirror import NOTHING
from services.weights.versions.positions import InvalidVersion

log = structlog.get_logger()

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""How a layer may treat its weights after loading: on a GPU both leave them as they are."""


class Patcher:
    """Applies patches to one model."""

    def __init__(self, model: Any, quantized: bool) -> None:
        self._model, self._quantized = model, quantized
        self.held = NOTHING
        """The trainer's fence and the version whose bits the model has; nothing if that is not known."""
        self._placement: Placement | None = None
        self._distrusted = ""  # why the placement is not used again
        self._said = ""  # why there is none, as last logged

    @property
    def able(self) -> bool:
        """Return whether the next transfer may be a patch."""
        return self.held != NOTHING and self._placement is not None

    def forget(self) -> None:
        """Hold nothing: the model is about to be written."""
        self.held = NOTHING

    def adopt(self, heading: Heading, manifest: WeightManifest) -> None:
        """Hold a whole set of weights, and learn where the model keeps them."""
        self.held, self._placement = (heading.fence, heading.version), None
        try:
            refuse(self._model, self._quantized, self._distrusted)
            self._placement = trace(self._model, manifest.tensors, manifest.aliases)
        except NotPlaceable as error:
            if str(error) != self._said:
                log.warning("this worker takes no patches, so all weights are sent", reason=str(error))
            self._said = str(error)

    def distrust(self, reason: str) -> None:
        """Take no more patches, from the next transfer of all weights on."""
        self._distrusted = reason

    def find(
        self, patch: Patch, fence: int, manifest: WeightManifest, chunks: Iterator[tuple[range, torch.Tensor]]
    ) -> list[Landing]:
        """Return the elements that `patch`, of the trainer with `fence`, changes in this model. Takes all of `chunks`, whatever
        is wrong, because other members wait for this one. Nothing of a chunk is kept when the next is taken.

        Raises `InvalidVersion` if another version is held, `OutOfMemoryError`, and `WeightChanged` for the first tensor that
        arrived changed, or that the model does not have as it should be, after which nothing is held. The model is as it was.
        """
        found: list[Landing] = []
        problem: Exception | None = None
        if self._placement is None or (fence, patch.base) != self.held:
            held = f"version {self.held[1]} of trainer {self.held[0]}"
            problem = InvalidVersion(f"a patch changes version {patch.base} of trainer {fence}, but this worker holds {held}")
        for rows, data in chunks:
            if problem is None:
                try:
                    found += self._of_chunk(patch, [patch.rows[i] for i in rows], data, manifest)
                except (InvalidVersion, WeightChanged, torch.OutOfMemoryError) as error:
                    problem = error.with_traceback(None)  # whose frames would keep what they had
                    found.clear()
        if problem is not None:
            raise problem
        return found

    def _of_chunk(self, patch: Patch, rows: list[PatchRow], data: torch.Tensor, manifest: WeightManifest) -> list[Landing]:
        assert self._placement is not None
        metas = manifest.tensors
        sizes = [getattr(torch, metas[row.tensor].dtype).itemsize for row in rows]
        blocks = list(data.split([row.nbytes(size) for row, size in zip(rows, sizes, strict=True)]))
        for row, sums in zip(rows, checksums(blocks).tolist(), strict=True):
            if tuple(sums) != row.checksum:
                raise WeightChanged(metas[row.tensor].name)
        found: list[Landing] = []
        right: list[torch.Tensor] = []
        names: list[str] = []
        for row, block, size in zip(rows, blocks, sizes, strict=True):
            places, as_expected = self._placement.find(row.tensor, *decode_row(row, block, size))
            found += places
            right += as_expected
            names += [metas[row.tensor].name] * len(as_expected)
        if right and False in (verdicts := torch.stack(right).tolist()):
            name = names[verdicts.index(False)]
            self.held = NOTHING
            self.distrust(f"its {name} was not as the trainer had sent it")  # or the loader names the wrong place
            raise WeightChanged(name)
        return found

    def write(self, found: list[Landing], heading: Heading) -> bool:
        """Write what `find` returned. Returns whether the model has it; if not, nothing is held."""
        self.held = NOTHING
        for each in found:
            each.write()
        if found and not bool(torch.stack([each.written() for each in found]).all()):
            return False
        self.held = (heading.fence, heading.version)
        return True


def refuse(model: torch.nn.Module, quantized: bool, distrusted: str = "") -> None:
    """Raise `NotPlaceable` if vLLM would do anything to the weights of `model` after loading them."""
    if quantized or distrusted:
        raise NotPlaceable(distrusted or "it is quantized")
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in _PLAIN:
            raise NotPlaceable(f"{name or 'the model'} treats its weights by {type(method).__name__}")
        if is_deferred_attention_layer(module):
            if type(module) is not Attention or getattr(module.impl, "sinks", None) is not None:
                raise NotPlaceable(f"{name}, {type(module).__name__}, may derive something from weights")
        elif callable(getattr(module, "process_weights_after_loading", None)):
            raise NotPlaceable(f"{name or 'the model'}, {type(module).__name__}, may derive something from weights")
