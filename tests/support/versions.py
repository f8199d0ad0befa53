"""Versions without a trainer: parameters, the encoders of some ranks, and the parts that they produce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from services.weights.buckets import describe
from services.weights.deadline import Deadline
from services.weights.versions.encoder import EncodedPart, ShardEncoder, whole_shards
from services.weights.versions.manifest import DataPart, VersionManifest, Weight, assemble
from services.weights.versions.mirror import Delta, WeightMirror
from services.weights.versions.objects import Target

FENCE = 7


class Publisher:
    """Produces versions of some parameters, as the ranks of a trainer do together."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], ranks: int = 1) -> None:
        self.parameters = parameters
        self.encoders = [ShardEncoder(whole_shards(parameters, rank, ranks), rank) for rank in range(ranks)]
        self.version = -1

    def anchor(self) -> tuple[VersionManifest, dict[int, memoryview]]:
        """Return the current weights as an anchor."""
        self.version += 1
        for encoder in self.encoders:
            encoder.load()
        return self._assembled([part for encoder in self.encoders for part in encoder.whole()], None)

    def delta(self) -> tuple[VersionManifest, dict[int, memoryview]]:
        """Return the changes since the last version."""
        self.version += 1
        return self._assembled([encoder.encode() for encoder in self.encoders], self.version - 1)

    def _assembled(self, parts: list[EncodedPart], base: int | None) -> tuple[VersionManifest, dict[int, memoryview]]:
        tensors = [describe(name, parameter) for name, parameter in self.parameters.items()]
        weights = [Weight(meta.name, [i], 0.0) for i, meta in enumerate(tensors)]
        named = [(DataPart(part.name, part.nbytes), part.pieces) for part in parts]
        manifest = assemble(self.version, FENCE, base, tensors, weights, named)
        data = {part.name: memoryview(b"".join(bytes(buffer) for buffer in part.buffers)) for part in parts}
        return manifest, {i: data[part.name] for i, part in enumerate(manifest.parts)}


def bring(mirror: WeightMirror, manifest: VersionManifest, parts: Iterable[tuple[int, memoryview]], last: bool = True) -> None:
    """Bring a mirror to a version whose parts are in memory."""
    if manifest.base is not None:
        mirror.apply(Delta(manifest, parts), last)
        return
    data = dict(parts)

    def read(part: int, targets: Sequence[Target]) -> Iterator[None]:
        if part not in data:
            raise OSError(f"part {part} is lacking")
        for offset, memory in targets:
            memory[:] = data[part][offset : offset + len(memory)]
            yield

    with ThreadPoolExecutor(2) as pool:
        mirror.load(manifest, read, pool, Deadline(20), last=last)


def parameters(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    """Return parameters of several dtypes and shapes: one empty, one scalar, one frozen, one of odd length."""
    torch.manual_seed(seed)
    made = {
        "bf16": torch.randn(300, 257).bfloat16(),
        "odd": torch.randn(1001).half(),
        "fp32": torch.randn(64, 64),
        "empty": torch.zeros(0, 5),
        "scalar": torch.randn(()),
        "frozen": torch.randn(100, 100).bfloat16(),
    }
    return {name: torch.nn.Parameter(value, requires_grad=name != "frozen") for name, value in made.items()}


@torch.no_grad()
def change(parameters: dict[str, torch.nn.Parameter], seed: int, share: float = 0.02) -> None:
    """Change a share of every trained weight's values."""
    torch.manual_seed(seed)
    for parameter in parameters.values():
        if parameter.requires_grad:
            parameter += torch.where(torch.rand_like(parameter) < share, torch.randn_like(parameter) * 0.01, 0.0)


def copies(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return copies of the current values."""
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def assert_same_bits(held: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and bytes."""
    assert list(held) == list(expected)
    for name, tensor in expected.items():
        assert (held[name].dtype, held[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(held[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
