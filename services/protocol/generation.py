"""Requests of environments to generators: tokens in, tokens out. Encoded with `codec`; not part of the run's streams."""

from __future__ import annotations

import msgspec
import numpy as np


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True):
    """Continue a sequence of tokens. Produced by environments, consumed by generators. The reply is a `Partial` of one."""

    id: str  # unique among requests that run at a time; a repeated request has the same
    prompt: np.ndarray  # [P] int32, the whole context
    seed: int
    max_tokens: int  # most tokens to sample, with those of `prefix`
    prefix: bytes = b""  # `Partial` of one completion, to continue; empty: none
    version: int | None = None  # policy version that is evaluated; None: the published one
