"""Losses trained on several ranks, and their twin: every response alone, in float64, by the literal formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.config.loss import Loss
from services.protocol.messages import Sample
from services.protocol.payloads import Payload
from tests.support.models.tiny_model import CONSTANT
from tests.trainer import literal

VARIANTS: dict[str, Loss] = {
    name: Loss.model_validate({"kl_beta": 0.1} | options)
    for name, options in {
        "gspo": {"policy": "gspo", "denominator": "sequence", "clip_low": 0.5, "clip_high": 0.5},
        "cispo": {"policy": "cispo", "denominator": "group"},
        "reinforce": {"policy": "reinforce", "denominator": "group", "correction_mask": {"sequence": [0.1, 3.0]}},
        "dppo": {"policy": "dppo_tv", "denominator": "constant", "clip_high": 0.003},
        "grpo": {
            "policy": "grpo",
            "denominator": "sequence",
            "correction_mask": {"token": [0.1, 5.0]},
            "entropy_coefficient": 0.05,
        },
        "own": {
            "policy": "tests.trainer.losses.test_custom:half",
            "correction_mask": {"variation": [0.4]},
            "denominator": "sequence",
        },
    }.items()
}
"""One mini-batch: without keys of the correction, ratios of all sizes occur, otherwise corrections of all sizes."""


def responses(folder: Path, payloads: Mapping[str, Payload], samples: Sequence[Sample]) -> tuple[Any, list[literal.Response]]:
    """Return `folder`'s model with transformers' own attention, and every trained sample with its theta and entropy."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    found = []
    for sample in samples:
        if not sample.trained_tokens:
            continue
        payload = payloads[sample.payload]
        start, first = int(payload.lengths[: sample.index].sum()), len(payload.prompt)
        tokens = slice(start, start + int(payload.lengths[sample.index]))
        ids = torch.from_numpy(np.concatenate((payload.prompt, payload.tokens[tokens])).astype(np.int64))
        table = (model(ids[None]).logits[0, first - 1 : -1] / 0.7).log_softmax(-1)
        theta = table.gather(1, ids[first:, None]).squeeze(1)
        behaviour = torch.from_numpy(payload.logprobs[tokens].astype(np.float64))
        for owner, begin, end in payload.tool_spans.tolist():
            if owner == sample.index:
                behaviour[begin:end] = torch.nan
        found.append(
            literal.Response(
                theta, theta.detach(), behaviour, theta.detach(), -(table.exp() * table).sum(1), sample.advantage, sample.weight,
                sample.payload,
            )
        )  # fmt: skip
    return model, found


def gradient(folder: Path, payloads: Mapping[str, Payload], samples: Sequence[Sample], config: Loss) -> dict[str, torch.Tensor]:
    """Return the gradient of the first optimizer step on one mini-batch; the reference is the model itself."""
    model, found = responses(folder, payloads, samples)
    constant = float(CONSTANT * len({sample.payload for sample in samples}))
    literal.objective(found, config, config.from_behaviour(1, 1), constant).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def priorities(
    folder: Path, payloads: Mapping[str, Payload], samples: Sequence[Sample], low: float, high: float
) -> dict[str, float]:
    """Sum, over a group's completions, |A| x the share of counted tokens that have not moved past 1 - low or 1 + high."""
    found = {sample.payload.rpartition(".")[0]: 0.0 for sample in samples}
    for one in responses(folder, payloads, samples)[1]:
        counted = one.behaviour.isfinite()
        moved = (one.theta.detach() - one.behaviour)[counted].exp()
        learnt = moved > 1 + high if one.advantage > 0 else moved < 1 - low
        found[str(one.group).rpartition(".")[0]] += abs(one.advantage) * float((~learnt).sum()) / max(1, int(counted.sum()))
    return found
