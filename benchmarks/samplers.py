"""Whether the engine's logprobs equal the trainer's, for every sampler: real vLLM against float64.

    python -m benchmarks.samplers --json

Samples completions from a tiny model with vLLM at every temperature x top_p x top_k, and computes the logprobs of their tokens in
float64 as the trainer defines them: over all tokens, at that temperature. `worst_gap` is the largest difference for a token, in
nats, among the samplers that a configuration may have (goal: 1e-4). For the others (`refused`), the figures show why: the mean
ratio of trainer to engine for a token, and the mean over responses of the product of their ratios, which is the bias of
importance weights. Without bias both are 1. `nats` is the mean surprise of a token, which shows how sharp the distribution was.
The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # `python benchmarks/samplers.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report
from services.config.generation import Sampling
from services.groups.generated import Generated, SamplingParameters
from tests.support.models.tiny_vllm import VOCABULARY, make_config, make_model

TEMPERATURES = (0.7, 1.0, 1.3)
TOP_P = (1.0, 0.95, 0.9, 0.8)
TOP_K = (0, 20, 3)
SHARPENED = 8.0
"""Factor on the random model's output matrix; otherwise its logits would be almost equal."""


def refused(top_p: float, top_k: int) -> bool:
    """Return whether a run cannot be trained with this sampler: section `sampling` has no keys for it."""
    return (top_p, top_k) != (1.0, 0) and not {"top_p", "top_k"} & Sampling.model_fields.keys()


def exact(model: Any, prompt: Sequence[int], tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Return the logprobs [T] of `tokens` after `prompt` by the float64 `model`."""
    import torch

    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    with torch.no_grad():
        table = (model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return table.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def judge(model: Any, made: Sequence[tuple[list[int], Generated]], temperature: float) -> dict[str, float]:
    """Compare the engine's logprobs with `exact`."""
    ours = [exact(model, prompt, one.tokens, temperature) for prompt, one in made]
    gaps = [whole - one.logprobs for whole, (_, one) in zip(ours, made, strict=True)]
    tokens = np.concatenate(gaps)
    return {
        "nats": float(-np.concatenate(ours).mean()),
        "gap": float(np.abs(tokens).max()),
        "token_ratio": float(np.exp(tokens).mean()),
        "response_ratio": float(np.mean([np.exp(gap.sum()) for gap in gaps])),
        "tokens": float(len(tokens)),
    }


async def sweep(folder: Path, completions: int, length: int) -> list[dict[str, Any]]:
    """Return the figures of every sampler."""
    import torch
    from transformers import AutoModelForCausalLM

    from services.generator.engines.vllm import VllmEngine

    model = make_model(folder, tied=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPENED)
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    engine = VllmEngine()
    await engine.start(make_config(folder))
    random = np.random.default_rng(0)
    prompts = [random.integers(2, VOCABULARY, 12).tolist() for _ in range(completions)]
    rows: list[dict[str, Any]] = []
    for temperature, top_p, top_k in product(TEMPERATURES, TOP_P, TOP_K):
        sampling = SamplingParameters(length, temperature, top_p, top_k)
        tag = f"{temperature}-{top_p}-{top_k}"
        made = await asyncio.gather(*(engine.generate(f"{tag}-{i}", prompt, i, sampling) for i, prompt in enumerate(prompts)))
        row = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "refused": refused(top_p, top_k)}
        rows.append(row | judge(model, list(zip(prompts, made, strict=True)), temperature))
    await engine.close()
    return rows


def main() -> int:
    """Measure every sampler. Return 1 if one that is not refused is wrong."""
    parser = arguments(__doc__)
    parser.add_argument("--completions", type=int, default=32)
    parser.add_argument("--length", type=int, default=32, help="tokens per completion")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as name:
        rows = asyncio.run(sweep(Path(name), options.completions, options.length))
    if not options.json:
        for row in rows:
            print("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    taken = [row["gap"] for row in rows if not row["refused"]]
    others = [row["response_ratio"] for row in rows if row["refused"]]
    figures = {"worst_gap": max(taken), "taken": len(taken), "refused": len(others), "worst_refused_response_ratio": min(others)}
    report({"benchmark": "samplers", "samplers": rows}, {name: [float(value)] for name, value in figures.items()})
    return 0 if max(taken) <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
