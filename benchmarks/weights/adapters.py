"""Adapters merged into the weights against adapters that vLLM serves: a part of benchmarks/weights."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.weights.engine import make_config, make_model
from services.generator.engines.vllm_arguments import engine_arguments, set_environment

RANK, SEQUENCES, TOKENS, PROMPT, REPEATS, UPDATES = 8, 64, 128, 32, 3, 4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(model: Any, folder: Path) -> Path:
    """Write a random adapter for every linear layer of the blocks, in the format of PEFT."""
    tensors = dict[str, torch.Tensor]()
    for name, layer in model.named_modules():
        if name.endswith(TARGETS):
            rows, columns = layer.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, columns).to(layer.weight.dtype) / columns**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK).to(layer.weight.dtype) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


async def adapters(folder: Path, samples: dict[str, list[float]]) -> None:
    """Measure tokens/s of a model of 113 MB with its adapter merged and with vLLM serving it, and the seconds to replace it."""
    model = make_model(folder).to(torch.bfloat16)
    saved = [str(save_adapter(model, folder / f"adapter-{i}")) for i in range(UPDATES)]
    config = make_config(
        folder,
        data={"sources": [{"kind": "jsonl", "path": "prompts.jsonl"}], "max_prompt_tokens": 64},
        sampling={"max_tokens": TOKENS},
        generator={"max_num_seqs": SEQUENCES, "engine_options": {"kv_cache_memory_bytes": 512 << 20}},
    )
    set_environment(config, False)
    usual = engine_arguments(config, False)
    serving = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1, "max_cpu_loras": 1}
    merged = await _speeds(usual, [], samples)
    served = await _speeds(usual | serving, saved, samples)
    samples["merged_tokens_per_s"], samples["served_tokens_per_s"] = merged, served
    samples["merged_speed"] = [max(merged) / max(served)]


async def _speeds(arguments: dict[str, Any], saved: list[str], samples: dict[str, list[float]]) -> list[float]:
    """Return the tokens/s of an engine, with the last of the saved adapters, if any."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    engine, adapter = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), None
    parameters = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0)

    async def complete(name: str) -> None:
        prompt = torch.randint(3, 1024, (PROMPT,)).tolist()
        async for _ in engine.generate(tokens_input(prompt), parameters, name, lora_request=adapter):
            pass

    try:
        for path in saved:
            adapter = LoRARequest("policy", 1, path, load_inplace=True)
            began = time.perf_counter()
            await engine.add_lora(adapter)
            samples.setdefault("served_update_s", []).append(time.perf_counter() - began)
        if adapter is not None:
            adapter.load_inplace = False  # requests use the one already loaded
        speeds = list[float]()
        for repeat in range(REPEATS + 1):
            began = time.perf_counter()
            await asyncio.gather(*(complete(f"{repeat}-{i}") for i in range(SEQUENCES)))
            speeds.append(SEQUENCES * TOKENS / (time.perf_counter() - began))
        return speeds[1:]  # the first one warms up
    finally:
        engine.shutdown()
