"""A stage that compiles models of many architectures (`trainer.compile`) and proves them."""

from __future__ import annotations

import json

import torch._dynamo
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks import tiny_models
from services.config.training import Trainer
from services.trainer.model import policy_network
from services.trainer.model.attention import NAME, packed_attention
from services.trainer.model.proof import Proof, Proofs
from tests.gpu.bench import Bench, Figures
from tests.support.models.tiny_model import make_config

ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "olmo2", "glm4", "granite", "smollm3", "qwen3_moe", "mixtral",
    "gpt_oss", "deepseek_v3", "gemma2",
)  # fmt: skip


def compiled_architectures(bench: Bench) -> Figures:
    """Prove tiny models with `trainer.compile`, as the trainer does when it loads a model, in the data type of training.

    `gaps` has how far compiled blocks in packed rows are from the model alone: the largest difference of a logprob, in nats, that
    of the gradient's norm as a share of it, and the difference of logprobs that one rounding makes; `failed` has the reasons.
    """
    gaps, failed = dict[str, list[float]](), dict[str, str]()
    tried = ARCHITECTURES[: bench.size(len(ARCHITECTURES), 1)]
    dtype = str(bench.dtype).removeprefix("torch.")
    for name in tried:
        folder, proofs = bench.folder / name, bench.folder / "proofs" / name
        torch._dynamo.reset()
        try:
            tiny_models.build(name).to(bench.dtype).save_pretrained(folder)
            ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)  # which compiled blocks replace
            config = make_config(folder, model={"dtype": dtype}).model
            policy_network.load(config, 1.0, 1024, Trainer(compile=True), proofs=Proofs(proofs), device=bench.device)
            (kept,) = proofs.iterdir()
            compiled = Proof(**json.loads(kept.read_text())[-1])
            gaps[name] = [compiled.gap, compiled.norm_gap, compiled.rounding]
        except Exception as error:  # whatever a model's code or the compiler raises
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:400]
    return {"architectures": len(tried), "gaps": gaps, "failed": failed}
