"""The trainer's end of a weight transfer, for tests: the sender of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from services.config import RunConfig
from services.trainer.model.lora import trained_weights
from services.weights.buckets import BUCKET_BYTES
from services.weights.transport import Sender, make_sender


def sender_of(
    config: RunConfig,
    model: torch.nn.Module,
    rank: int = 0,
    ranks: int = 1,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
    bucket_bytes: int = BUCKET_BYTES,
) -> Sender:
    """Return the sender of `model`'s weights that `sync.backend` names."""
    return make_sender(config, trained_weights(model, config.lora), rank, ranks, gather, bucket_bytes)
