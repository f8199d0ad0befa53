"""A stage that compiles models of many architectures: `trainer.compile` against the same model without it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch._dynamo
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks import tiny_models
from services.trainer.model import policy_network
from services.trainer.model.attention import NAME, packed_attention
from services.trainer.model.computing import PLAIN, Computing
from services.trainer.model.proof import ProofRow
from tests.gpu.bench import Bench, Figures
from tests.support.models.tiny_model import make_config

ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "olmo2", "glm4", "granite", "smollm3", "qwen3_moe", "mixtral",
    "gpt_oss", "deepseek_v3", "gemma2",
)  # fmt: skip
LARGEST_GAP = 0.1
"""In nats, twice what proofs allow between packed rows and single sequences in bfloat16."""


def compiled_architectures(bench: Bench) -> Figures:
    """Compare logprobs and the gradient's norm of tiny models with and without `trainer.compile`, in the data type of training.

    `gaps` has the largest difference of a logprob, in nats, and that of the norm as a share of it; `failed` has the reasons.
    """
    gaps, failed = dict[str, list[float]](), dict[str, str]()
    tried = ARCHITECTURES[: bench.size(len(ARCHITECTURES), 1)]
    for name in tried:
        folder = bench.folder / name
        torch._dynamo.reset()
        try:
            tiny_models.build(name).to(bench.dtype).save_pretrained(folder)
            (plain, norm), (compiled, other) = (_passed(bench, folder, each) for each in (PLAIN, Computing(compiled=True)))
        except Exception as error:  # whatever a model's code or the compiler raises
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        gaps[name] = [float((plain - compiled).abs().max()), abs(norm - other) / norm]
        if not gaps[name][0] <= LARGEST_GAP:
            failed[name] = f"logprobs differ by {gaps[name][0]:.2g} nats"
    return {"architectures": len(tried), "gaps": gaps, "failed": failed}


def _passed(bench: Bench, folder: Path, computing: Computing) -> tuple[torch.Tensor, float]:
    """Return the logprobs of a row, and the norm of the gradient of their weighted sum."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)  # which compiled blocks replace
    dtype = str(bench.dtype).removeprefix("torch.")
    scorer = policy_network.load(make_config(folder, model={"dtype": dtype}).model, 1.0, 1024, computing).to(bench.device)
    row = ProofRow.of(tiny_models.VOCABULARY, bench.device)
    logprobs, _ = scorer.train()(row.input_ids, row.positions, row.packing, row.predictors, row.targets)
    (logprobs * row.factors).sum().backward()
    gradients = [weight.grad for weight in scorer.parameters() if weight.grad is not None]
    return logprobs.detach(), float(torch.nn.utils.get_total_norm(gradients))
