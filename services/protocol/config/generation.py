"""How completions are made: sampling, generator pods and weight-sync rounds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.protocol.config.base import Section


class Sampling(Section):
    """Sampling parameters of training completions."""

    group_size: int = Field(default=8, ge=2)
    """Completions of one prompt, a group."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest completion in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; the trainer divides its logits by the same number."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass; below 1 the behaviour logprobs are those of the truncated distribution."""
    top_k: int = Field(default=0, ge=0)
    """Number of likeliest tokens kept; 0: all."""
    stop: list[str] = []
    """Further stop strings beside the end-of-sequence token."""


class Generator(Section):
    """Generator pods: vLLM engines that claim tickets and submit groups."""

    count: int = Field(default=1, ge=1)
    """Generators that `grpo run` starts on this machine."""
    engine: str = "vllm"
    """`vllm`, or `package.module:Class` for an engine of your own (the interface is services/generator/engine.py)."""
    max_concurrent_groups: int = Field(default=32, ge=1)
    """Most tickets one generator holds at a time."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Most sequences vLLM runs in one iteration."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs one engine is spread over."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory vLLM may take."""
    cpu_kv_cache_mib: int = Field(default=256, ge=16)
    """KV cache of an engine on a CPU, in MiB."""
    engine_options: dict[str, Any] = {}
    """Further vLLM engine arguments by name; they win over ours."""
    lease_s: float = Field(default=15.0, gt=0)
    """A claimed ticket whose generator was not heard of for so long is claimed by another."""
    max_attempts: int = Field(default=4, ge=1)
    """Claims of one ticket that may end in a failure before it goes to the dead letters."""
    drain_s: float = Field(default=10.0, ge=0)
    """After SIGTERM: time to finish what is running; the rest is handed back with the tokens made so far."""
    max_expiries: int = Field(default=16, ge=1)
    """Leases of one ticket that may run out, each with a generator that died, before it goes to the dead letters."""
    partial_every_s: float = Field(default=5.0, gt=0)
    """How often the tokens so far of unfinished completions are saved for whoever has to continue them."""
    verifier_workers: int = Field(default=2, ge=1)
    """Processes that score completions."""


class Sync(Section):
    """Weight-sync rounds between the trainer and the generators."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`nccl` on GPUs, `gloo` on CPUs; `auto` takes what the machine has."""
    host: str = ""
    """Address under which generators reach trainer rank 0; empty: the trainer's own host name, 127.0.0.1 in `grpo run`."""
    bucket_mib: int = Field(default=256, ge=1)
    """Weights are gathered and broadcast in buckets of about this size, in MiB."""
    join_deadline_s: float = Field(default=20.0, gt=0)
    """A member that has not joined and paused by then is left out of the round."""
    transfer_deadline_s: float = Field(default=120.0, gt=0)
    """A broadcast or an apply that takes longer breaks the group; the round goes on under a new epoch."""


class Fleet(Section):
    """Heartbeats."""

    heartbeat_s: float = Field(default=1.0, gt=0)
    """How often a pod renews its record."""
    ttl_s: float = Field(default=10.0, gt=0)
    """A pod not heard of for so long counts as gone."""
