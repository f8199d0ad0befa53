"""Sampling, generator pods, weight-sync rounds and fleet heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from services.config.base import Section


class Sampling(Section):
    """Sampling parameters of training completions."""

    group_size: int = Field(default=8, ge=2)
    """Completions per prompt. Together they form a group."""
    min_group_size: int = Field(default=0, ge=0)
    """Minimum number of rollouts in a group that is trained on; rollouts that failed are left out. 0: all of `group_size`."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum length of a completion in tokens. Unset: what prompts leave of `model.max_tokens`, at most this default."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature. The trainer divides its logits by the same number. Tokens are sampled from the whole distribution,
    since the trainer could not compute the logprobs of a truncated one (top-p, top-k; docs/semantics.md)."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Stop strings in addition to the end-of-sequence token."""


class Generator(Section):
    """Generator pods: vLLM engines that claim tickets and submit groups."""

    count: int = Field(default=1, ge=1)
    """Number of generators that `grpo run` starts on this machine."""
    engine: str = "vllm"
    """`vllm`, or `package.module:Class` for a custom engine (it implements services/generator/engines/base.py)."""
    max_concurrent_groups: int = Field(default=0, ge=0)
    """Maximum number of tickets in progress on one generator. Below that limit the number adapts to its load. 0: no limit."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of sequences that vLLM runs in one iteration."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs per engine."""
    engine_options: dict[str, Any] = {}
    """Further vLLM engine arguments by name, e.g. `gpu_memory_utilization`, or `kv_cache_memory_bytes` (256 MiB on a CPU). They
    override the ones set here. Refused: arguments that would change the distribution whose logprobs the trainer recomputes, such
    as `logits_processors`."""
    lease_s: float = Field(default=15.0, gt=0)
    """Seconds without a lease renewal after which another generator may claim a ticket."""
    max_attempts: int = Field(default=4, ge=1)
    """Failed attempts after which a ticket goes to the dead letters."""
    drain_s: float = Field(default=10.0, ge=0)
    """Seconds that a generator has after SIGTERM to finish running tickets. It hands back the rest with their tokens so far."""
    verifier_workers: int = Field(default=2, ge=1)
    """Number of processes of each generator that score completions."""

    @property
    def cpu_kv_cache_bytes(self) -> int:
        """Bytes of the KV cache of an engine on a CPU."""
        return self.engine_options.get("kv_cache_memory_bytes", 256 << 20)


class Sync(Section):
    """Weight-sync rounds between the trainer and the generators."""

    backend: Literal["auto", "gloo", "nccl", "filesystem", "store"] = "auto"
    """`nccl` for GPUs, `gloo` for CPUs; `auto` chooses one of them. `filesystem` and `store` need no network between the
    trainer and the generators. `filesystem`: all weights pass through files in `sync.folder`. `store`: `sync.folder` keeps the
    last versions, each as the changes since the previous one; generators fetch them while they sample, without the trainer."""
    folder: str = ""
    """`filesystem` and `store`: a folder on a volume that the trainer and the generators share, used by this run alone. Empty:
    `weights` in the run's folder. `store` also takes a URL: `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`."""
    encoding: Literal["full", "delta", "auto", "sparse"] = "full"
    """What a round of `gloo`, `nccl` or `filesystem` sends. `full`: all weights. `delta`: the bits that changed, if every member
    of the round has the version sent last, and all weights otherwise. `auto`: whichever of the two took less time; the other is
    tried again from time to time. With `delta` and `auto`, the trainer's rank 0 and each rank of a generator keep a copy of the
    weights in host memory. `sparse`, only with `backend = "nccl"`: as `delta`, but every trainer rank finds on its GPU which
    values of its share of the weights changed, and keeps a copy of that share there; generators write them into the tensors that
    they sample with. Nothing passes through host memory. Not yet run between two GPUs. `store` always sends only changes."""
    in_flight: Literal["keep", "drain", "abort"] = "keep"
    """What happens to unfinished completions when new weights are applied. `keep` continues them under the new weights and
    records the policy version of every token; `drain` starts no others and lets them finish first, for up to half of
    `join_deadline_s` or `transfer_deadline_s`, whichever is less; `abort` restarts them. With `drain` and `abort` every
    completion has a single version."""
    kv: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache when new weights are applied. `keep` lets unfinished completions continue with their KV
    cache, computed under older weights; requests that reach the engine later never use it. `recompute` drops it, and they are
    prefilled again under the new weights, which takes time, but then their later tokens depend on the new weights alone. In
    both cases the logprobs are those with which the tokens were sampled."""
    host: str = ""
    """Address at which generators reach trainer rank 0. Empty: the trainer's host name, or 127.0.0.1 in `grpo run`."""
    verify: bool = True
    """Compare checksums of the received weights with the trainer's. Over a network this takes a few per cent of a round."""
    verify_loaded: bool = False
    """Compare the tensors that vLLM has after loading with the weights that arrived, during the pause. A generator whose tensors
    differ does not sample until it has loaded other weights. Quantized models and layers that vLLM repacks (on CPUs, all linear
    layers) are not compared."""
    join_deadline_s: float = Field(default=20.0, gt=0)
    """Seconds that a generator has to join a round and pause; after that the round proceeds without it."""
    transfer_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds that a broadcast or an apply may take; after that the group is dissolved and the round continues in a new epoch."""

    @property
    def drain_deadline_s(self) -> float:
        """Seconds after which `drain` restarts completions: it leaves as much time for the phase that waits for it."""
        return min(self.join_deadline_s, self.transfer_deadline_s) / 2


OWNED_OPTIONS = {
    "logprobs_mode": "the trainer recomputes the logprobs of the distribution that tokens were sampled from",
    "logits_processors": "they change the distribution that tokens are sampled from, which the trainer cannot recompute",
    "generation_config": "its sampling defaults would change the distribution that tokens are sampled from",
    "override_generation_config": "its sampling defaults would change the distribution that tokens are sampled from",
    "max_model_len": "set model.max_tokens instead, by which the trainer chooses factors of rope that depend on the length",
    "model": "set model.path instead, which the trainer loads, too",
}
"""Arguments of vLLM that would make its logprobs those of another distribution than the trainer's, each with the reason."""


def owned_options(generator: Generator) -> Iterator[str]:
    """Describe every engine argument that is set although it must not be changed."""
    for name, reason in OWNED_OPTIONS.items():
        if generator.engine == "vllm" and name in generator.engine_options:
            yield f"generator.engine_options.{name} = {generator.engine_options[name]!r} cannot be set: {reason}; remove it"


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for an impossible smallest group."""
    minimum, maximum = sampling.min_group_size, sampling.group_size
    if minimum and not 2 <= minimum <= maximum:
        raise ValueError(
            f"sampling.min_group_size = {minimum} must be from 2, since rollouts of a group are compared, to "
            f"sampling.group_size = {maximum}; or 0, which requires all of them"
        )


class Fleet(Section):
    """Heartbeats, and who sets the number of generators."""

    ttl_s: float = Field(default=10.0, gt=0)
    """Seconds without a heartbeat after which a pod counts as gone. A pod sends ten in that time."""
    scaling: Literal["request", "kubectl", "hpa", "keda"] = "request"
    """Who sets the number of generators. `request`: the number last requested, e.g. with `grpo scale`. On a cluster whose chart
    has no scaler: `kubectl`, or the autoscaler (`hpa`, `keda`); a request for a number is then refused."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats: several may be late or lost before a pod counts as gone."""
        return self.ttl_s / 10

    @property
    def refusal(self) -> str:
        """Return why a number of generators cannot be requested, and what to do; empty if it can."""
        if self.scaling == "request":
            return ""
        if self.scaling == "kubectl":
            remedy = "use kubectl scale, or set scaler.enabled = true in the chart's values"
        else:
            remedy = (
                "set generator.autoscaling.minReplicas and maxReplicas in the chart's values, or "
                "generator.autoscaling.kind = none to scale on request"
            )
        return f'fleet.scaling = "{self.scaling}": this cluster does not follow requests for a number of generators; {remedy}'
