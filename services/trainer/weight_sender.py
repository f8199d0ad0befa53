"""Provides a trainer rank's data for the generators: the policy's weights under their Hugging Face names, with adapters
merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from services.config import RunConfig
from services.trainer.model import lora
from services.trainer.ranks import to_rank_0
from services.weights.collective import BUCKET_BYTES
from services.weights.sender import Merge, Sender, WeightSender
from services.weights.sparse.sender import SparseWeightSender
from services.weights.versions.sender import StoreWeightSender


def make_weight_sender(config: RunConfig, model: torch.nn.Module, rank: int, bucket_bytes: int = BUCKET_BYTES) -> WeightSender:
    """Return the sender of `model`'s weights to a group; every rank makes one."""
    return WeightSender(config, _parts(model), _merge(config), rank, bucket_bytes)


def make_sender(
    config: RunConfig,
    model: torch.nn.Module,
    rank: int,
    ranks: int,
    gather: Callable[[Any], list[Any]],
    bucket_bytes: int = BUCKET_BYTES,
) -> Sender:
    """Return the sender of `sync.backend`; every rank makes one. `gather` returns the values of all ranks."""
    if config.sync.backend == "store":
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return StoreWeightSender(config, parameters, lora.sources(parameters), rank, ranks, gather)
    if config.sync.encoding == "sparse":
        return SparseWeightSender(config, _parts(model), _merge(config), rank, ranks, gather, to_rank_0, bucket_bytes)
    return make_weight_sender(config, model, rank, bucket_bytes)


def _parts(model: torch.nn.Module) -> dict[str, Sequence[torch.nn.Parameter]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: [parameters[part] for part in names] for name, names in lora.sources(parameters).items()}


def _merge(config: RunConfig) -> Merge:
    return lambda weights: lora.merged(weights, config.lora)
