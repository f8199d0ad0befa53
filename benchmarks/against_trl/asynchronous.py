"""Train with `AsyncGRPOTrainer` of `trl.experimental` on a CPU, for benchmarks/against_trl/run.py.

The trainer, its loss (a clipped ratio to the policy that sampled, as in `grpo run`), its rollout worker process, its queue and
its staleness rule are TRL's own, and the server is vLLM's own. Three parts support only GPUs. They are replaced through TRL's
extension points or by equivalent code:

- weights: `weight_transfer`, TRL's protocol, passes a file in memory to `reload_weights` instead of using NCCL;
- attention: torch's attention over segments padded to the longest replaces FlashAttention 3's `flash_attn_varlen_func`;
- seeds: requests are sent without `seed`, which is slow on CPUs. TRL sends it because engines with equal seeds could sample
  the same text; here there is one engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import torch
import trl.experimental.async_grpo.async_rollout_worker as rollout_worker  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing  # pyright: ignore[reportMissingImports]

from benchmarks.against_trl.colocated import engine_arguments
from benchmarks.against_trl.example import Example, Output, same_rates, step_reporter
from services.runtime.process_tools import die_with_parent, free_port

MEMORY = Path("/dev/shm")
READY_S = 600.0
END_S = 30.0
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close_pattern": r"<\|end\|>", "content": "text"}},
}
"""How to parse a reply in the example's chat template; TRL only knows the templates of large models."""
MAX_NUM_SEQS = 512


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor,
    longest_q: int, longest_k: int, softmax_scale: float | None = None, causal: bool = True, window_size: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Compute `flash_attn_varlen_func` [tokens, heads, size] with torch over padded segments; causal masks align at the ends."""
    assert (causal, window_size) == (True, (-1, -1))
    place_q, lengths_q = padded(starts_q, longest_q)
    place_k, lengths_k = padded(starts_k, longest_k)
    columns = torch.arange(longest_k)
    last = torch.arange(longest_q)[None, :] + (lengths_k - lengths_q)[:, None]  # [segments, queries]: the last visible key
    mask = columns[None, None, :] <= last[:, :, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        query[place_q].transpose(1, 2), key[place_k].transpose(1, 2), value[place_k].transpose(1, 2),
        attn_mask=mask[:, None], scale=softmax_scale, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2)[torch.arange(longest_q)[None, :] < lengths_q[:, None]]


def padded(starts: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token positions of every segment [segments, longest], some past its end, and the segments' lengths."""
    lengths = (starts[1:] - starts[:-1]).long()
    places = starts[:-1, None].long() + torch.arange(longest)[None, :]
    return places.clamp(max=int(starts[-1]) - 1), lengths


class Kernel:
    """Replaces the FlashAttention 3 kernel."""

    flash_attn_varlen_func = staticmethod(varlen_attention)


class FileTransfer:
    """Implements TRL's `WeightTransferProtocol` with a file in memory."""

    def __init__(self, url: str) -> None:
        self._url, self._path = url, MEMORY / f"trl-{os.getpid()}"

    def _post(self, path: str, **given: Any) -> None:
        answer = requests.post(f"{self._url}/{path}", timeout=120, **given)
        assert answer.ok, f"{path}: {answer.status_code} {answer.text[:500]}"

    def init_weight_transfer(self) -> None:
        """Wait for the server, and create the folder."""
        async_grpo_trainer.VLLMClient(self._url, READY_S).wait_for_server_ready()
        self._path.mkdir(exist_ok=True)

    def pause(self) -> None:
        """Pause sampling, and keep the requests in progress."""
        self._post("pause", params={"mode": "keep"})

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the weights to the file, and have the server load it."""
        weights = {name: weight.detach() for name, weight in iterator}
        save_file(weights, str(self._path / "model.safetensors"), metadata={"format": "pt"})
        self._post("collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": str(self._path)}})

    def resume(self) -> None:
        """Resume sampling."""
        self._post("resume")

    def destroy(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._path, ignore_errors=True)


class Unseeded(rollout_worker._AsyncRolloutLoop):
    """TRL's request loop, without seeds."""

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> dict[str, Any]:
        payload.pop("seed", None)
        return await super()._post(path, payload, timeout, max_retries)


def serve(example: Example, threads: int) -> tuple[subprocess.Popen[bytes], str]:
    """Start vLLM's server with the arguments of our own generator; return the process and its URL."""
    config, given = example.config, engine_arguments(example)
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model.path, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", given["dtype"], "--enforce-eager", "--kv-cache-memory-bytes",
        str(given["kv_cache_memory_bytes"]), "--max-model-len", str(config.model.max_tokens), "--max-num-seqs",
        str(MAX_NUM_SEQS), "--max-num-batched-tokens", str(MAX_NUM_SEQS * config.data.max_prompt_tokens), "--logprobs-mode",
        "processed_logprobs", "--disable-log-stats", "--disable-uvicorn-access-log", "--distributed-executor-backend", "uni",
    ]  # fmt: skip
    environ = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, env=environ, preexec_fn=die_with_parent), f"http://127.0.0.1:{port}"


def asynchronous(job: dict[str, Any], example: Example, output: Output) -> None:
    """Train with `AsyncGRPOTrainer` beside a vLLM server."""
    settings, config = job["settings"], example.config
    assert settings["micro_batch"] == example.completions, "its loss is a mean of micro-batch means, ours a mean over tokens"
    server, url = serve(example, settings["server_threads"])
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # unknown for a CPU, and only used by a metric
    packing._flash_attn = lambda: Kernel
    packing.get_target_dtype = lambda query, module: None  # FlashAttention has no float32; torch has
    rollout_worker.AsyncRolloutWorker._loop_cls = Unseeded

    batches = deque[dict[str, float]]()  # the loader is one batch ahead of the step, and TRL reports a batch when it is loaded
    collate = async_grpo_trainer.DataCollatorForRollout._log_metrics

    def note(self: Any, rows: Any, all_examples: list[dict[str, Any]], padded: Any) -> None:
        rewards = [each["metrics"]["reward"] for each in all_examples]
        tokens = sum(int(each["completion_mask"].sum()) for each in all_examples)
        batches.append({"reward": sum(rewards) / len(rewards), "tokens": tokens, "completions": len(rewards)})
        collate(self, rows=rows, all_examples=all_examples, padded=padded)

    async_grpo_trainer.DataCollatorForRollout._log_metrics = note

    class ReportingTrainer(same_rates(AsyncGRPOTrainer, example)):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            started = self.rollout_worker.start

            def start() -> None:
                started()  # returns when the worker is about to send its first request
                output.generating()

            self.rollout_worker.start = start

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        tokenizer.response_template = RESPONSE
        arguments = AsyncGRPOConfig(
            **example.settings(job), dtype=config.model.dtype, vllm_server_base_url=url, vllm_server_timeout=READY_S,
            token_budget=0, max_staleness=settings["staleness"], max_inflight_tasks=settings["in_flight"],
        )  # fmt: skip
        ReportingTrainer(
            model=config.model.path, reward_funcs=example.reward, args=arguments,
            train_dataset=Dataset.from_list(example.conversations(tokenizer)),
            processing_class=tokenizer, callbacks=[step_reporter(example, output, batches.popleft)],
            weight_transfer=FileTransfer(url),
        ).train()  # fmt: skip
    finally:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
