"""A model that stores weights as vLLM does on a GPU: fused, sharded by tensor parallelism, padded, with a float32 head."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from services.weights.collective import WeightManifest, plan_buckets
from services.weights.host_memory import describe

WIDTH, WORDS = 24, 36


def checkpoint(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return weights under a checkpoint's names."""
    torch.manual_seed(seed)
    shapes = {
        "embed": (WORDS, WIDTH), "q": (16, WIDTH), "k": (8, WIDTH), "v": (8, WIDTH), "o": (WIDTH, 16), "norm": (WIDTH,),
        "experts": (4, 8, WIDTH), "turned": (WIDTH, 8), "head": (WORDS, WIDTH),
    }  # fmt: skip
    weights = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    return weights | {"counts": torch.randint(0, 1000, (8,))}


def manifest_of(weights: dict[str, torch.Tensor], bucket_bytes: int = 1024) -> WeightManifest:
    """Return the manifest of a group that sends patches."""
    planned = plan_buckets([describe(name, weight) for name, weight in weights.items()], bucket_bytes)
    return WeightManifest(planned.buckets, deltas=True, sparse=True, aliases={"tied": "embed"})


class FusedModel(torch.nn.Module):
    """Rank `rank` of `ranks`. Like vLLM's, its `load_weights` works through views and copies."""

    def __init__(self, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks

        def made(*shape: int, of: torch.dtype = dtype) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=of), requires_grad=False)

        self.embed = made(WORDS // ranks + 4, WIDTH)  # padded
        self.qkv = made(32 // ranks, WIDTH)
        self.o = made(WIDTH, 16 // ranks)
        self.norm = made(WIDTH)
        self.experts = made(4 // ranks, 8, WIDTH)
        self.turned = made(8, WIDTH)
        self.head = made(WORDS // ranks, WIDTH, of=torch.float32)
        self.counts = made(8, of=torch.int64)

    def share(self, weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's slice."""
        size = weight.shape[dim] // self.ranks
        return weight.narrow(dim, self.rank * size, size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name in ("q", "k", "v"):
                start = {"q": 0, "k": 16, "v": 24}[name] // self.ranks
                mine = self.share(weight)
                self.qkv.data.narrow(0, start, mine.shape[0]).copy_(mine)
            elif name == "embed":
                mine = self.share(weight)
                self.embed[: mine.shape[0]].data.copy_(mine)
                self.embed[mine.shape[0] :].data.fill_(0)
            elif name == "o":
                self.o.data.copy_(self.share(weight, 1))
            elif name == "experts":
                for expert, mine in enumerate(self.share(weight)):
                    self.experts.data[expert].copy_(mine)
            elif name == "turned":
                self.turned.data.copy_(weight.t())
            elif name == "head":
                self.head.data.copy_(self.share(weight))
            elif name in ("norm", "counts"):
                self.get_parameter(name).data.copy_(weight)

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the rank's tensors."""
        return {name: tensor.detach().clone() for name, tensor in self.named_parameters()}
