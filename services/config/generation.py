"""Sampling, generator pods, weight-sync rounds and fleet heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

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
    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of sequences that vLLM runs in one iteration."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs per engine."""
    engine_options: dict[str, Any] = {}
    """Further vLLM engine arguments by name, e.g. `gpu_memory_utilization`, or `kv_cache_memory_bytes` (256 MiB on a CPU). They
    override the ones set here. Refused: arguments that would change the distribution whose logprobs the trainer recomputes, such
    as `logits_processors`."""
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

    backend: Literal["auto", "gloo", "nccl", "store"] = "auto"
    """`nccl` for GPUs, `gloo` for CPUs; `auto` chooses one of them. `store` needs no network between the trainer and the
    generators: `sync.folder` keeps the last versions, each as the changes since the previous one, and generators fetch them while
    they sample, without the trainer."""
    folder: str = ""
    """`store`: a folder on a volume that the trainer and the generators share, used by this run alone, or a URL:
    `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`. Empty: `weights` in the run's folder."""
    host: str = ""
    """Address at which generators reach trainer rank 0. Empty: the trainer's host name, or 127.0.0.1 in `grpo run`."""
    deadline_s: float = Field(default=120.0, gt=0)
    """Seconds that a generator has to receive and apply a version; after that the round continues without it. To join a round and
    to pause it has 20 of them."""

    @field_validator("backend", mode="before")
    @classmethod
    def _not_removed(cls, backend: object) -> object:
        if backend == "filesystem":
            raise ValueError('was removed: set "store", which needs the same shared volume and sends less')
        return backend

    @property
    def answer_s(self) -> float:
        """Seconds that a generator has to join a round, and to pause."""
        return min(ANSWER_S, self.deadline_s)


ANSWER_S = 20.0
"""Limit of the phases of a round in which no weights are sent: they take tenths of a second."""

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
    scaling: Literal["request", "cluster"] = "request"
    """Who sets the number of generators. `request`: the number last requested, e.g. with `grpo scale`. `cluster`: an autoscaler,
    or `kubectl scale` where the chart's scaler is off; a request for a number is then refused."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats: several may be late or lost before a pod counts as gone."""
        return self.ttl_s / 10

    @property
    def lease_s(self) -> float:
        """Seconds without a renewal after which another pod may claim a ticket: longer than until its holder counts as gone."""
        return 1.5 * self.ttl_s

    @property
    def refusal(self) -> str:
        """Return why a number of generators cannot be requested, and what to do; empty if it can."""
        if self.scaling == "request":
            return ""
        return (
            f'fleet.scaling = "{self.scaling}": this cluster does not follow requests for a number of generators; use kubectl '
            "scale or generator.autoscaling.minReplicas and maxReplicas in the chart's values, or set scaler.enabled = true and "
            "generator.autoscaling.kind = none there to scale on request"
        )
