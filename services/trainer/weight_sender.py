"""What a trainer rank sends to the generators: the policy's weights under their Hugging Face names, with adapters merged."""

from __future__ import annotations

import torch

from services.config import RunConfig
from services.trainer.model import lora
from services.weights.collective import BUCKET_BYTES
from services.weights.sender import WeightSender


def make_weight_sender(config: RunConfig, model: torch.nn.Module, rank: int, bucket_bytes: int = BUCKET_BYTES) -> WeightSender:
    """Return the sender of `model`'s weights; every rank makes one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts = {name: [parameters[part] for part in names] for name, names in lora.sources(parameters).items()}
    return WeightSender(config, parts, lambda weights: lora.merged(weights, config.lora), rank, bucket_bytes)
