"""The whole configuration: all sections, and what several of them say together."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.config.base import Section
from services.config.data import Data, VerifierConfig
from services.config.evaluation import Evaluation
from services.config.generation import Fleet, Generator, Sampling, Sync
from services.config.loss import Loss
from services.config.tracing import Tracing
from services.config.tracking import Tracking
from services.config.training import (
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
from services.protocol.shards import MOST


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
    """Memory that the server may use, or each, with `payload_shards`; 0: its own `maxmemory`, if it has one. Near it checkpoints
    come early, and no new prompt is issued."""
    payload_shards: int = Field(default=0, ge=0, le=MOST)
    """On a Redis Cluster: payloads are spread over its masters, in so many shards; as many as there are masters, or some times
    that. 0: they lie with the rest of the run, on one master. A run keeps what it began with."""


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
    verifiers: list[VerifierConfig] = Field(min_length=1)
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
