"""How completions are made: sampling, generator pods and weight-sync rounds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.config.base import Section


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
    """`vllm`, or `package.module:Class` for an engine of your own (the interface is services/generator/engines/base.py)."""
    max_concurrent_groups: int = Field(default=0, ge=0)
    """Most tickets one generator holds at a time; how many it does hold below that follows its load. 0: no bound but the load."""
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

    backend: Literal["auto", "gloo", "nccl", "filesystem"] = "auto"
    """`nccl` on GPUs, `gloo` on CPUs; `auto` takes what the machine has. `filesystem` needs no network between trainer and
    generators: weights pass through files in `sync.folder`."""
    folder: str = ""
    """With `filesystem`: a folder on a volume that trainer and generators share, for this run alone; empty: `weights` in the
    run's folder."""
    in_flight: Literal["keep", "drain", "abort"] = "keep"
    """Completions under way when weights are applied: `keep` goes on with them under the new weights, their versions recorded by
    token; `drain` lets them end first, starting none, for up to `drain_deadline_s`; `abort` begins them anew. With the last two
    every completion is of one version."""
    drain_deadline_s: float = Field(default=10.0, gt=0)
    """With `drain`: completions that have not ended by then begin anew under the new weights."""
    host: str = ""
    """Address under which generators reach trainer rank 0; empty: the trainer's own host name, 127.0.0.1 in `grpo run`."""
    bucket_mib: int = Field(default=32, ge=1)
    """Weights are gathered and broadcast in buckets of about this size, in MiB, of which several are on their way at a time."""
    verify: bool = True
    """Whether generators compare checksums of what they received with the trainer's: over a network some per cent of a round."""
    join_deadline_s: float = Field(default=20.0, gt=0)
    """A member that has not joined and paused by then is left out of the round."""
    transfer_deadline_s: float = Field(default=120.0, gt=0)
    """A broadcast or an apply that takes longer breaks the group; the round goes on under a new epoch."""


def check_sync(sync: Sync) -> None:
    """Raise ValueError where draining leaves no time for what comes after it."""
    if sync.in_flight != "drain":
        return
    limits = {"transfer_deadline_s": sync.transfer_deadline_s}
    if sync.backend in ("auto", "nccl"):  # then members drain before they are ready
        limits["join_deadline_s"] = sync.join_deadline_s
    for name, limit_s in limits.items():
        if sync.drain_deadline_s >= limit_s:
            raise ValueError(
                f"sync.drain_deadline_s = {sync.drain_deadline_s} leaves nothing of sync.{name} = {limit_s}: lower the one or "
                "raise the other"
            )


class Fleet(Section):
    """Heartbeats."""

    heartbeat_s: float = Field(default=1.0, gt=0)
    """How often a pod renews its record."""
    ttl_s: float = Field(default=10.0, gt=0)
    """A pod not heard of for so long counts as gone."""
    scaling: Literal["wish", "kubectl", "hpa", "keda"] = "wish"
    """Who decides how many generators there are: `wish`, whoever asks for a number (`grpo scale`); on a cluster `kubectl` alone,
    where the chart has no scaler, or its autoscaler. Where no wish would be followed, it is refused."""

    @property
    def refusal(self) -> str:
        """Why no number of generators can be asked for, and what to do; empty: it can."""
        if self.scaling == "wish":
            return ""
        if self.scaling == "kubectl":
            remedy = "use kubectl scale, or set scaler.enabled = true in the values of the chart"
        else:
            remedy = (
                "set generator.autoscaling.minReplicas and maxReplicas in the values of the chart, or "
                "generator.autoscaling.kind = none to scale by wish"
            )
        return f'fleet.scaling = "{self.scaling}": nobody follows a wish for generators here; {remedy}'
