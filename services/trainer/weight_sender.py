"""What a trainer rank sends to the generators: the policy's weights under their Hugging Face names, with adapters merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from services.config import RunConfig
from services.trainer.model import lora
from services.weights.collective import BUCKET_BYTES
from services.weights.sender import Sender, WeightSender
from services.weights.versions.sender import StoreWeightSender


def make_weight_sender(config: RunConfig, model: torch.nn.Module, rank: int, bucket_bytes: int = BUCKET_BYTES) -> WeightSender:
    """Return the sender of `model`'s weights to a group; every rank makes one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts = {name: [parameters[part] for part in names] for name, names in lora.sources(parameters).items()}
    return WeightSender(config, parts, lambda weights: lora.merged(weights, config.lora), rank, bucket_bytes)


def make_sender(config: RunConfig, model: torch.nn.Module, rank: int, ranks: int, gather: Callable[[Any], list[Any]]) -> Sender:
    """Return the sender of `sync.backend`; every rank makes one. `gather` returns the values of all ranks."""
    if config.sync.backend != "store":
        return make_weight_sender(config, model, rank)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return StoreWeightSender(config, parameters, lora.sources(parameters), rank, ranks, gather)
