"""The whole configuration, and the rules that span sections."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.protocol.config.base import Section
from services.protocol.config.data import Data, Verifier, check_verifiers
from services.protocol.config.evaluation import Evaluation, check_evaluation
from services.protocol.config.generation import Fleet, Generator, Sampling, Sync, check_sync
from services.protocol.config.loss import Loss, check_loss
from services.protocol.config.tracing import Tracing
from services.protocol.config.tracking import Tracking
from services.protocol.config.training import (
    Admission,
    Advantage,
    Checkpoint,
    Filters,
    Lora,
    Optimizer,
    Reference,
    Replay,
    Trainer,
)


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
    """`redis://host:port/0`, `rediss://…` or `unix://…`; any node of a Redis Cluster will do. Empty: `grpo run` starts a server
    of its own."""
    password_file: str = ""
    """File that holds the password; empty: the environment variable GRPO_REDIS_PASSWORD, if set."""
    users_dir: str = ""
    """Folder with a file for each kind of service, which holds the password of its Redis user `RUN.KIND` (docs/security.md); a
    pod needs the one of its own kind only. Empty: all use the password above."""
    ca_file: str = ""
    """Certificates, PEM, of who may have signed the server's, with `rediss://`; empty: those that the system trusts."""
    appendfsync: Literal["always", "everysec"] = "everysec"
    """How often the server that `grpo run` starts forces its append-only file to disk."""
    max_memory_mib: int = Field(default=0, ge=0)
    """Memory that the server may use; 0: its own `maxmemory`, if it has one. Near it checkpoints come early, and no new prompt is
    issued."""


class Model(Section):
    """The policy."""

    path: str
    """Folder or hub name of a Hugging Face model with its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in generators and trainer."""
    fp32_head: bool = False
    """bfloat16: multiply by the output matrix in float32, in generators and trainer, so that logits are not rounded."""
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
    read_token_file: str = ""
    """File with a bearer token that may look, and change nothing; empty: the environment variable GRPO_API_READ_TOKEN. With
    neither, everybody may look. `grpo run` makes one."""
    certificate_file: str = ""
    """Certificate chain, PEM, with which the endpoints speak TLS; empty: they speak plain HTTP."""
    key_file: str = ""
    """Private key of that certificate, PEM."""
    ca_file: str = ""
    """Certificates, PEM, of who may have signed the endpoints', for those who call them; empty: those that the system trusts."""
    server_name: str = ""
    """Name that the endpoints' certificate bears, where pods that share one are called by address; empty: the address."""


class Web(Section):
    """The console as a web page (docs/console.md)."""

    host: str = "127.0.0.1"
    """Address that the page is served on; `0.0.0.0` inside a pod."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the page, which `grpo run` then serves; 0: it does not, unless it is given --web, which takes a free one."""


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
    filters: Filters = Filters()
    """Which finished groups are not trained on."""
    advantage: Advantage = Advantage()
    """Advantages over the full group."""
    loss: Loss = Loss()
    """The policy loss."""
    reference: Reference = Reference()
    """The reference policy."""
    lora: Lora = Lora()
    """Low-rank adapters."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    trainer: Trainer = Trainer()
    """Trainer ranks."""
    sync: Sync = Sync()
    """Weight-sync rounds."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""
    evaluation: Evaluation = Evaluation()
    """Evaluation rounds beside training."""
    tracking: Tracking = Tracking()
    """Experiment trackers beside the run's own files."""
    tracing: Tracing = Tracing()
    """Traces of groups."""
    fleet: Fleet = Fleet()
    """Heartbeats."""
    api: Api = Api()
    """REST endpoints."""
    web: Web = Web()
    """The console as a web page."""

    @property
    def slots(self) -> int:
        """Tickets that may be under way at a time (docs/design.md, section 4)."""
        return (self.admission.max_staleness + 1) * self.admission.prompts_per_step

    @property
    def weights_folder(self) -> Path:
        """Where weights pass through with `sync.backend = "filesystem"`."""
        return Path(self.sync.folder or Path(self.run.dir) / self.run.name / "weights")

    @property
    def data_parallel(self) -> int:
        """Ranks, or teams of ranks, that have rows of their own."""
        return self.trainer.ranks // self.trainer.sequence_parallel

    @property
    def trained_dtype(self) -> str:
        """Type of the weights that are trained: adapters are float32, or small steps would be rounded away."""
        return "float32" if self.lora.rank else self.model.dtype

    @property
    def smallest_error_buffer(self) -> float:
        """Smallest `replay.error_buffer` with which a step's draws and an insert are never both refused."""
        return (self.admission.prompts_per_step + self.replay.samples_per_insert) / 2

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus completion this run can make, in tokens."""
        return self.data.max_prompt_tokens + self.sampling.max_tokens

    def largest_reward(self, source: str) -> float:
        """Largest reward that a completion of a prompt of that source can earn: every score with a positive weight is 1."""
        return sum(max(verifier.weight, 0.0) for verifier in self.verifiers if verifier.scores(source))

    @property
    def largest_rewards(self) -> dict[str, float]:
        """The largest reward of every prompt source, by its name."""
        return {source.name: self.largest_reward(source.name) for source in self.data.sources}

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
        self._check_replay()
        self._check_training()
        check_loss(self.loss, self.advantage.kind)
        check_sync(self.sync)
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
        if bool(self.api.certificate_file) != bool(self.api.key_file):
            raise ValueError(
                f"api.certificate_file = {self.api.certificate_file!r} and api.key_file = {self.api.key_file!r} go together: "
                "set both for TLS, or neither"
            )
        if self.api.server_name and not self.api.certificate_file:
            raise ValueError(
                f"api.server_name = {self.api.server_name!r} has no effect without api.certificate_file: set that, or remove it"
            )
        if self.redis.ca_file and self.redis.url and not self.redis.url.startswith("rediss://"):
            raise ValueError(
                f"redis.ca_file = {self.redis.ca_file!r} has no effect with redis.url = {self.redis.url!r}: use rediss://, "
                "or remove it"
            )
        check_verifiers(self.verifiers, [*self.data.sources, *self.evaluation.sources])
        for source in self.data.sources:
            if self.filters.exclude_pass_rate and not self.largest_reward(source.name):
                raise ValueError(
                    f"filters.exclude_pass_rate = {self.filters.exclude_pass_rate} has no meaning for the prompt source "
                    f'"{source.name}", whose largest reward is 0: give it a verifier of positive weight, or remove the key'
                )
        for source in self.evaluation.sources:
            if not self.largest_reward(source.name):
                raise ValueError(
                    f'the largest reward of evaluation source "{source.name}" is 0, so every completion would count as correct: '
                    "give it a verifier of positive weight"
                )
        check_evaluation(self.evaluation, self.sampling, self.data.max_prompt_tokens, self.model.max_tokens, self.generator.count)
        for verifier in self.verifiers:
            if verifier.kind == "regex" and not verifier.pattern:
                raise ValueError('verifiers: kind "regex" needs `pattern`')
        return self

    def _check_training(self) -> None:
        """Which combinations of model, reference, optimizer and trainer mean something."""
        trainer, optimizer, reference, beta = self.trainer, self.optimizer, self.reference, self.loss.kl_beta
        if trainer.offload and trainer.zero_stage == 0:
            raise ValueError("trainer.offload needs trainer.zero_stage 1, 2 or 3: set one, or trainer.offload = false")
        if trainer.ranks % trainer.sequence_parallel:
            raise ValueError(
                f"trainer.ranks = {trainer.ranks} cannot be split into teams of trainer.sequence_parallel = "
                f"{trainer.sequence_parallel}: set a multiple of it"
            )
        if self.model.fp32_head and self.model.dtype == "float32":
            raise ValueError('model.fp32_head has no effect with model.dtype = "float32": remove it, or set "bfloat16"')
        if beta > 0 and reference.kind == "none":
            raise ValueError(
                f'loss.kl_beta = {beta} needs a reference policy, but reference.kind = "none": set "frozen" or "polyak", '
                "or loss.kl_beta = 0"
            )
        if beta == 0 and reference.kind == "polyak":
            raise ValueError(
                'reference.kind = "polyak" has no effect with loss.kl_beta = 0, which loads no reference: '
                'set loss.kl_beta > 0, or reference.kind = "none"'
            )
        if reference.kind != "polyak" and (reference.alpha, reference.every_steps) != (
            Reference().alpha,
            Reference().every_steps,
        ):
            raise ValueError(
                f'reference.alpha and reference.every_steps have no effect with reference.kind = "{reference.kind}": '
                'remove them, or set reference.kind = "polyak"'
            )
        if not self.lora.rank and self.lora != Lora():
            raise ValueError("lora.alpha and lora.targets have no effect with lora.rank = 0: remove them, or set lora.rank")
        if self.lora.rank and reference.kind == "polyak":
            raise ValueError(
                f'lora.rank = {self.lora.rank} and reference.kind = "polyak" do not go together: the average of adapters is '
                'not that of the weights they make; set reference.kind = "frozen", or lora.rank = 0'
            )
        if optimizer.schedule == "constant" and optimizer.final_fraction:
            raise ValueError(
                f"optimizer.final_fraction = {optimizer.final_fraction} has no effect with optimizer.schedule = "
                '"constant": set "linear" or "cosine", or remove it'
            )
        if optimizer.schedule != "constant" and optimizer.warmup_steps >= self.run.steps:
            raise ValueError(
                f"optimizer.warmup_steps = {optimizer.warmup_steps} leaves no step of run.steps = {self.run.steps} for "
                f'optimizer.schedule = "{optimizer.schedule}": lower it'
            )

    def _check_replay(self) -> None:
        """Which combinations of the replay table's keys make a run that goes on."""
        replay, admission = self.replay, self.admission
        if replay.max_uses > admission.max_staleness + 1:
            raise ValueError(
                f"replay.max_uses = {replay.max_uses} cannot be reached: a group is at most admission.max_staleness = "
                f"{admission.max_staleness} steps old; lower replay.max_uses to {admission.max_staleness + 1} "
                "or raise admission.max_staleness"
            )
        if replay.max_uses == 0 and replay.sampler == "fifo":
            raise ValueError(
                'replay.sampler = "fifo" needs replay.max_uses >= 1: without it the same oldest groups would be drawn for ever'
            )
        if replay.max_uses == 0 and not replay.samples_per_insert:
            raise ValueError(
                "replay.max_uses = 0 needs replay.samples_per_insert >= 1: else nothing says how many prompts are to be generated"
            )
        if replay.samples_per_insert and replay.samples_per_insert < 1:
            raise ValueError(
                f"replay.samples_per_insert = {replay.samples_per_insert} would generate groups that no step trains on: "
                "set 1 or more, or 0 for no limiter"
            )
        if replay.max_uses and replay.samples_per_insert > replay.max_uses:
            raise ValueError(
                f"replay.samples_per_insert = {replay.samples_per_insert} cannot be reached with replay.max_uses = "
                f"{replay.max_uses}: lower it, or raise replay.max_uses"
            )
        if replay.error_buffer and not replay.samples_per_insert:
            raise ValueError("replay.error_buffer has no effect without replay.samples_per_insert: set that, or remove it")
        if replay.error_buffer and replay.error_buffer < self.smallest_error_buffer:
            raise ValueError(
                f"replay.error_buffer = {replay.error_buffer} could refuse a step and an insert at once: set at least "
                f"{self.smallest_error_buffer} (half of admission.prompts_per_step + replay.samples_per_insert), or 0 for that"
            )
        if replay.min_size > min(replay.capacity, self.slots):
            raise ValueError(
                f"replay.min_size = {replay.min_size} cannot be reached: the table holds replay.capacity = {replay.capacity} "
                f"groups and the run has {self.slots} slots, (admission.max_staleness + 1) x admission.prompts_per_step; lower it"
            )
        if replay.priority == "trainer" and replay.max_uses == 1:
            raise ValueError(
                'replay.priority = "trainer" has no effect with replay.max_uses = 1: a group leaves when it was trained; raise it'
            )
        weighted = replay.sampler == "prioritized" or replay.remover == "lowest_priority"
        if not weighted and replay.priority != "advantage":
            raise ValueError(
                f'replay.priority = "{replay.priority}" has no effect: set replay.sampler = "prioritized" or replay.remover = '
                '"lowest_priority"'
            )
        if replay.importance_beta and (replay.sampler != "prioritized" or replay.priority_exponent == 0):
            raise ValueError(
                f"replay.importance_beta = {replay.importance_beta} corrects draws by weight: "
                'set replay.sampler = "prioritized" and replay.priority_exponent above 0, or remove it'
            )
