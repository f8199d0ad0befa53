"""The whole configuration, and the rules that span sections."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from services.protocol.config.base import Section
from services.protocol.config.data import Data, Verifier
from services.protocol.config.generation import Fleet, Generator, Sampling, Sync
from services.protocol.config.training import Admission, Advantage, Checkpoint, Loss, Optimizer, Replay, Trainer


class Run(Section):
    """What the run is called, how long it is and where it writes."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    """Name of the run: its folder, and the prefix of its keys in Redis."""
    steps: int = Field(default=100, ge=1)
    """Training steps."""
    seed: int = Field(default=0, ge=0)
    """Seed of prompt order, sampling and initialisation."""
    dir: str = "runs"
    """Folder that holds the run's folder."""


class Redis(Section):
    """The one stateful part."""

    url: str = ""
    """`redis://host:port/0`, `rediss://…` or `unix://…`; empty: `grpo run` starts a server of its own."""
    password_file: str = ""
    """File that holds the password; empty: the environment variable GRPO_REDIS_PASSWORD, if set."""
    appendfsync: Literal["always", "everysec"] = "everysec"
    """How often the server that `grpo run` starts forces its append-only file to disk."""


class Model(Section):
    """The policy."""

    path: str
    """Folder or hub name of a Hugging Face model with its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in generators and trainer."""
    max_tokens: int = Field(default=4096, ge=2)
    """Longest prompt plus completion, in tokens."""


class Api(Section):
    """The REST endpoints of every service."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` inside a pod."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: a free one, published in the fleet."""
    token_file: str = ""
    """File with the bearer token of mutating calls; empty: the environment variable GRPO_API_TOKEN. `grpo run` makes one."""


class RunConfig(Section):
    """Everything a run is. Sections are tables of the TOML file."""

    run: Run = Run()
    """What the run is called, how long it is and where it writes."""
    redis: Redis = Redis()
    """The one stateful part."""
    model: Model
    """The policy."""
    data: Data
    """Where prompts come from and how they become tokens."""
    verifiers: list[Verifier] = Field(min_length=1)
    """How completions are scored."""
    sampling: Sampling = Sampling()
    """Sampling parameters of training completions."""
    generator: Generator = Generator()
    """Generator pods."""
    admission: Admission = Admission()
    """How much work is under way."""
    replay: Replay = Replay()
    """The replay table."""
    advantage: Advantage = Advantage()
    """Advantages over the full group."""
    loss: Loss = Loss()
    """The policy loss."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    trainer: Trainer = Trainer()
    """Trainer ranks."""
    sync: Sync = Sync()
    """Weight-sync rounds."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""
    fleet: Fleet = Fleet()
    """Heartbeats."""
    api: Api = Api()
    """REST endpoints."""

    @property
    def slots(self) -> int:
        """Tickets that may be under way at a time (docs/design.md, section 4)."""
        return (self.admission.max_staleness + 1) * self.admission.prompts_per_step

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus completion this run can make, in tokens."""
        return self.data.max_prompt_tokens + self.sampling.max_tokens

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        longest = self.max_sequence_tokens
        if longest > self.model.max_tokens:
            raise ValueError(
                f"data.max_prompt_tokens + sampling.max_tokens = {longest} exceeds model.max_tokens = {self.model.max_tokens}: "
                "lower one of the two or raise model.max_tokens"
            )
        if longest > self.trainer.row_tokens:
            raise ValueError(
                f"trainer.row_tokens = {self.trainer.row_tokens} is shorter than the longest sequence, "
                f"data.max_prompt_tokens + sampling.max_tokens = {longest}: raise trainer.row_tokens"
            )
        if self.replay.capacity < self.admission.prompts_per_step:
            raise ValueError(
                f"replay.capacity = {self.replay.capacity} cannot hold a step of admission.prompts_per_step = "
                f"{self.admission.prompts_per_step} groups: raise replay.capacity"
            )
        if self.replay.max_uses > self.admission.max_staleness + 1:
            raise ValueError(
                f"replay.max_uses = {self.replay.max_uses} cannot be reached: a group is at most admission.max_staleness = "
                f"{self.admission.max_staleness} steps old; lower replay.max_uses to {self.admission.max_staleness + 1} "
                "or raise admission.max_staleness"
            )
        if self.trainer.offload and self.trainer.zero_stage == 0:
            raise ValueError("trainer.offload needs trainer.zero_stage 1, 2 or 3: set one, or trainer.offload = false")
        if self.loss.denominator == "constant" and self.loss.denominator_tokens == 0:
            raise ValueError('loss.denominator = "constant" needs loss.denominator_tokens > 0')
        if self.loss.correction_lower > self.loss.correction_upper:
            raise ValueError(
                f"loss.correction_lower = {self.loss.correction_lower} exceeds "
                f"loss.correction_upper = {self.loss.correction_upper}: swap them"
            )
        if self.fleet.ttl_s <= 2 * self.fleet.heartbeat_s:
            raise ValueError(
                f"fleet.ttl_s = {self.fleet.ttl_s} must be more than twice fleet.heartbeat_s = {self.fleet.heartbeat_s}, "
                "else one late heartbeat removes a pod"
            )
        if self.trainer.mini_batches > self.admission.prompts_per_step:
            raise ValueError(
                f"trainer.mini_batches = {self.trainer.mini_batches} exceeds admission.prompts_per_step = "
                f"{self.admission.prompts_per_step}: a mini-batch holds at least one group, lower it"
            )
        scorer = any(v.kind == "reasoning_gym" for v in self.verifiers)
        if scorer and self.data.source.kind != "reasoning_gym":
            raise ValueError(
                'verifiers: kind "reasoning_gym" scores prompts of data.source.kind = "reasoning_gym", '
                f'not "{self.data.source.kind}": '
                'use "math", "exact" or "regex"'
            )
        for verifier in self.verifiers:
            if verifier.kind == "regex" and not verifier.pattern:
                raise ValueError('verifiers: kind "regex" needs `pattern`')
        return self
