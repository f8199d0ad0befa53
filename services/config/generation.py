"""Sampling, generator pods, weight-sync rounds and fleet heartbeats."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.config.base import Section


class Sampling(Section):
    """Sampling parameters of training completions."""

    group_size: int = Field(default=8, ge=2)
    """Completions per prompt. Together they form a group."""
    min_group_size: int = Field(default=0, ge=0)
    """Least rollouts of a group that is trained on: those that an environment failed are left out. 0: all of `group_size`."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum length of a completion in tokens. Unset: what prompts leave of `model.max_tokens`, at most this default."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature. The trainer divides its logits by the same number."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling mass. Only 1 can be trained on: the logprobs of a truncated distribution are not the trainer's
    (docs/semantics.md). `evaluation.top_p` is free."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens to sample from. Only 0, all of them, can be trained on; `evaluation.top_k` is free."""
    stop: list[str] = []
    """Stop strings in addition to the end-of-sequence token."""


class Generator(Section):
    """Generator pods: vLLM engines that claim tickets and submit groups."""

    count: int = Field(default=1, ge=1)
    """Number of generators that `grpo run` starts on this machine."""
    engine: str = "vllm"
    """`vllm`, or `package.module:Class` for a custom engine (it implements services/generator/engines/base.py)."""
    max_concurrent_groups: int = Field(default=0, ge=0)
    """Maximum number of tickets that one generator holds. Below that limit the number adapts to its load. 0: no limit."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of sequences that vLLM runs in one iteration."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs per engine."""
    cpu_kv_cache_mib: int = Field(default=256, ge=16)
    """KV cache of an engine on a CPU, in MiB."""
    engine_options: dict[str, Any] = {}
    """Further vLLM engine arguments by name, e.g. `gpu_memory_utilization`. They override the ones set here."""
    lease_s: float = Field(default=15.0, gt=0)
    """Seconds without a lease renewal after which another generator may claim a ticket."""
    max_attempts: int = Field(default=4, ge=1)
    """Failed attempts after which a ticket goes to the dead letters."""
    drain_s: float = Field(default=10.0, ge=0)
    """Seconds that a generator has after SIGTERM to finish running tickets. It hands back the rest with their tokens so far."""
    verifier_workers: int = Field(default=2, ge=1)
    """Number of processes that score completions."""


class Sync(Section):
    """Weight-sync rounds between the trainer and the generators."""

    backend: Literal["auto", "gloo", "nccl", "filesystem", "store"] = "auto"
    """`nccl` for GPUs, `gloo` for CPUs; `auto` chooses by the machine. `filesystem` and `store` need no network between the
    trainer and the generators. `filesystem`: all weights pass through files in `sync.folder`. `store`: `sync.folder` keeps the
    last versions, each as what changed since the one before; generators fetch them while they sample, and without the trainer."""
    folder: str = ""
    """`filesystem` and `store`: a folder on a volume that the trainer and the generators share, used by this run alone. Empty:
    `weights` in the run's folder. `store` also takes a URL: `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`."""
    in_flight: Literal["keep", "drain", "abort"] = "keep"
    """What happens to unfinished completions when new weights are applied. `keep` continues them under the new weights and
    records the policy version of every token; `drain` starts no others and lets them finish first, for up to
    `drain_deadline_s`; `abort` restarts them. With `drain` and `abort` every completion has a single version."""
    kv: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV cache when new weights are applied. `recompute` drops it, and unfinished completions are prefilled
    again under the new weights. `keep` lets them go on with the KV that they have, computed under older weights; requests that
    start later never use it. The logprobs are those the tokens were sampled with in both cases."""
    drain_deadline_s: float = Field(default=10.0, gt=0)
    """`drain`: completions that have not finished by then restart under the new weights."""
    host: str = ""
    """Address at which generators reach trainer rank 0. Empty: the trainer's host name, or 127.0.0.1 in `grpo run`."""
    verify: bool = True
    """Compare checksums of the received weights with the trainer's. Over a network this takes a few per cent of a round."""
    join_deadline_s: float = Field(default=20.0, gt=0)
    """Seconds that a generator has to join a round and pause; after that the round proceeds without it."""
    transfer_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds that a broadcast or an apply may take; after that the group is dissolved and the round continues in a new epoch."""


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for sampling from a part of the distribution, whose logprobs the trainer cannot compute, and for an
    impossible smallest group.
    """
    least, most = sampling.min_group_size, sampling.group_size
    if least and not 2 <= least <= most:
        raise ValueError(
            f"sampling.min_group_size = {least} must be from 2, since rollouts of a group are compared, to sampling.group_size = "
            f"{most}; or 0, which requires all of them"
        )
    for name, value, whole in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != whole:
            raise ValueError(
                f"sampling.{name} = {value} cannot be trained on: the engine's logprobs would be those of the tokens that it "
                "kept and the trainer's those of all, which biases every ratio between them (docs/semantics.md, Sampling): set "
                f"sampling.{name} = {whole}, and lower sampling.temperature or set evaluation.{name} instead"
            )


def check_sync(sync: Sync) -> None:
    """Raise ValueError if draining leaves no time for the phases of a round that follow it."""
    if sync.in_flight != "drain":
        return
    limits = {"transfer_deadline_s": sync.transfer_deadline_s}
    if sync.backend in ("auto", "nccl"):  # with these, members drain before they report ready
        limits["join_deadline_s"] = sync.join_deadline_s
    for name, limit_s in limits.items():
        if sync.drain_deadline_s >= limit_s:
            raise ValueError(
                f"sync.drain_deadline_s = {sync.drain_deadline_s} must be less than sync.{name} = {limit_s}: lower the first or "
                "raise the second"
            )


class Fleet(Section):
    """Heartbeats, and who sets the number of generators."""

    ttl_s: float = Field(default=10.0, gt=0)
    """Seconds without a heartbeat after which a pod counts as gone. A pod sends ten in that time."""
    scaling: Literal["wish", "kubectl", "hpa", "keda"] = "wish"
    """Who sets the number of generators. `wish`: the number last requested, e.g. with `grpo scale`. On a cluster whose chart has
    no scaler: `kubectl`, or the autoscaler (`hpa`, `keda`); a request for a number is then refused."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats: several may be late or lost before a pod counts as gone."""
        return self.ttl_s / 10

    @property
    def refusal(self) -> str:
        """Return why a number of generators cannot be requested, and what to do; empty if it can."""
        if self.scaling == "wish":
            return ""
        if self.scaling == "kubectl":
            remedy = "use kubectl scale, or set scaler.enabled = true in the chart's values"
        else:
            remedy = (
                "set generator.autoscaling.minReplicas and maxReplicas in the chart's values, or "
                "generator.autoscaling.kind = none to scale on request"
            )
        return f'fleet.scaling = "{self.scaling}": this cluster does not follow requests for a number of generators; {remedy}'
