"""The whole configuration: all sections, and values derived from several of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from services.config.base import Section
from services.config.data import Data, Source
from services.config.environments import EnvironmentConfig
from services.config.evaluation import Evaluation
from services.config.generation import Fleet, Generator, Sampling, Sync
from services.config.loss import Loss
from services.config.secrets import split_password
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
from services.config.verifiers import VerifierConfig, named

DEFAULTS: Any = {}
"""What a section that the file leaves out is made of. For an instance, pydantic would build a validator of that section alone."""


class Tracking(Section):
    """Trackers that receive every recorded step and evaluation round. They require the extra `tracking` (docs/metrics.md)."""

    tensorboard: bool = False
    """Write TensorBoard's event files to run.dir/run.name/tracking/tensorboard."""
    wandb: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,128}$")
    """Weights & Biases project. Empty: none. Its files are written to run.dir/run.name/tracking/wandb, for `wandb sync`; with the
    environment variable WANDB_MODE = online they are uploaded, which needs an API key."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the enabled trackers."""
        return ("tensorboard",) * self.tensorboard + ("wandb",) * bool(self.wandb)


class Samples(Section):
    """The sample log: every completion with its prompt, scores and outcome, as Parquet files (docs/samples.md)."""

    keep: int = Field(default=1_000_000, ge=0)
    """Completions to keep in run.dir/run.name/samples; the oldest are deleted first. 0: no sample log."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the prompts whose completions are logged, chosen by a hash of the ticket; and share of the groups that are traced,
    with `tracing.endpoint`."""


class Tracing(Section):
    """One trace per group, from its ticket to the steps that train on it. Requires the extra `tracing` (docs/operating.md)."""

    endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Endpoint for spans, OTLP over HTTP, such as `http://collector:4318/v1/traces`. Empty: tracing is off."""


class Run(Section):
    """The run's name, its length and its output folder."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    """Name of the run. It names the run's folder and prefixes its keys in Redis."""
    steps: int = Field(default=100, ge=1)
    """Number of training steps."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of prompt order, sampling and initialisation."""
    dir: str = "runs"
    """Folder in which the run's folder is created."""


class Redis(Section):
    """Redis, the only stateful service."""

    url: str = ""
    """`redis://host:port/0`, `rediss://…` or `unix://…`; for a Redis Cluster, any of its nodes. Empty: `grpo run` starts its own
    server."""
    password_file: str = ""
    """File that contains the password, or a folder with one such file per kind of service, for that service's Redis user
    `RUN.KIND` (docs/security.md); a pod needs only the file of its own kind. Empty: the environment variable
    GRPO_REDIS_PASSWORD, if set."""
    ca_file: str = ""
    """`rediss://`: PEM file of the CA bundle used to verify the server certificate. Empty: the system's CA bundle."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        split_password(url)
        return url


class Model(Section):
    """The policy model."""

    path: str
    """Folder or hub name of a Hugging Face model with its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights in generators and trainer."""
    fp32_head: bool = False
    """`bfloat16`: compute the output projection in float32, in generators and trainer, so that logits are not rounded."""
    max_tokens: int = Field(default=4096, ge=2)
    """Maximum length of prompt plus completion, in tokens. Unset: the length of the model's context, but at most this default, or
    what the other lengths need."""


class Api(Section):
    """The REST endpoints of every service."""

    host: str = "127.0.0.1"
    """Address to listen on. Use `0.0.0.0` inside a pod."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on. 0: a free one, which is published in the fleet."""
    token_file: str = ""
    """File with the bearer token required for mutating calls. Empty: the environment variable GRPO_API_TOKEN. `grpo run`
    generates one."""
    read_token_file: str = ""
    """File with a bearer token for read-only calls. Empty: the environment variable GRPO_API_READ_TOKEN. If neither is set,
    reading needs no token. `grpo run` generates one."""
    certificate_file: str = ""
    """PEM file of the certificate chain and its private key, with which the endpoints serve TLS; or a folder with both, as
    `tls.crt` and `tls.key`. Empty: they serve plain HTTP."""
    ca_file: str = ""
    """PEM file of the CA bundle with which clients verify the endpoints' certificates. Empty: the system's CA bundle."""


class Web(Section):
    """The console as a web page (docs/console.md)."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port on `api.host` at which `grpo run` serves the web console. 0: not served, unless `--web` is given, which picks a free
    port."""


class RunConfig(Section):
    """All keys that define a run. Sections are tables of the TOML file."""

    run: Run = DEFAULTS
    """The run's name, its length and its output folder."""
    redis: Redis = DEFAULTS
    """Redis, the only stateful service."""
    model: Model
    """The policy model."""
    data: Data
    """Where prompts come from and how they are tokenised."""
    verifiers: list[VerifierConfig] = []
    """How completions are scored. Rollouts in an environment may be scored by it alone."""
    environments: list[EnvironmentConfig] = []
    """Environments, which reply to the policy in rollouts of several turns."""
    sampling: Sampling = DEFAULTS
    """Sampling parameters of training completions."""
    generator: Generator = DEFAULTS
    """Generator pods."""
    admission: Admission = DEFAULTS
    """How much work may be in progress."""
    replay: Replay = DEFAULTS
    """The replay table."""
    filters: Filters = DEFAULTS
    """Which finished groups are not trained on."""
    advantage: Advantage = DEFAULTS
    """Advantages over the full group."""
    loss: Loss = DEFAULTS
    """The policy loss."""
    reference: Reference = DEFAULTS
    """The reference policy."""
    lora: Lora = DEFAULTS
    """Low-rank adapters."""
    optimizer: Optimizer = DEFAULTS
    """The optimizer."""
    trainer: Trainer = DEFAULTS
    """Trainer ranks."""
    sync: Sync = DEFAULTS
    """Weight-sync rounds."""
    checkpoint: Checkpoint = DEFAULTS
    """Checkpoints."""
    evaluation: Evaluation = DEFAULTS
    """Evaluation rounds during training."""
    tracking: Tracking = DEFAULTS
    """Experiment trackers besides the run's own files."""
    samples: Samples = DEFAULTS
    """The sample log."""
    tracing: Tracing = DEFAULTS
    """OpenTelemetry traces of groups."""
    fleet: Fleet = DEFAULTS
    """Heartbeats, and who sets the number of generators."""
    api: Api = DEFAULTS
    """REST endpoints."""
    web: Web = DEFAULTS
    """The console as a web page."""

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return the configuration with other values of these keys, written as `section.key`; they are not validated."""
        sections = dict[str, dict[str, object]]()
        for key, value in values.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return self.model_copy(update={name: getattr(self, name).model_copy(update=sections[name]) for name in sections})

    @property
    def slots(self) -> int:
        """Maximum number of tickets that may be in progress at a time (docs/design.md, section 4)."""
        return (self.admission.max_staleness + 1) * self.admission.prompts_per_step

    @property
    def weights_place(self) -> str:
        """Folder or URL of the versions with `sync.backend = "store"`."""
        if "://" in self.sync.folder:
            return self.sync.folder
        return str(Path(self.sync.folder or Path(self.run.dir) / self.run.name / "weights").absolute())

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks, or of teams with sequence parallelism."""
        return self.trainer.ranks // self.trainer.sequence_parallel

    @property
    def from_behaviour(self) -> bool:
        """Whether the policy loss takes its ratio to the generators' logprobs (docs/semantics.md)."""
        return self.loss.from_behaviour(self.admission.max_staleness, self.trainer.mini_batches)

    @property
    def trained_dtype(self) -> str:
        """Data type of the trained weights. Adapters are float32, since bfloat16 would round small steps away."""
        return "float32" if self.lora.rank else self.model.dtype

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum length of prompt plus completion in this run, in tokens."""
        return self.data.max_prompt_tokens + self.sampling.max_tokens

    @property
    def all_sources(self) -> list[Source]:
        """The prompt sources that are trained on, and those of evaluation."""
        return [*self.data.sources, *self.evaluation.sources]

    @property
    def source_names(self) -> list[str]:
        """Names of the prompt sources that are trained on."""
        return [source.name for source in self.data.sources]

    def environment_of(self, source: str) -> EnvironmentConfig | None:
        """Return the environment of the prompt source of that name, or None if its rollouts are single completions."""
        names = [each.environment for each in self.all_sources if each.name == source]
        return next((each for each in self.environments if each.name in names), None)

    @property
    def sources_with_environment(self) -> frozenset[str]:
        """Names of the prompt sources, trained on or evaluated, whose rollouts run in an environment."""
        return frozenset(source.name for source in self.all_sources if source.environment)

    def verified(self, source: str) -> bool:
        """Return whether a verifier scores the completions of a source."""
        return any(verifier.scores(source) for verifier in self.verifiers)

    def thresholds(self, source: str) -> dict[str, float]:
        """Return verifier -> the score from which a completion of that source counts as solved. Empty: none can tell."""
        found = {name: verifier.threshold for name, verifier in named(self.verifiers) if verifier.scores(source)}
        if environment := self.environment_of(source):
            found[environment.name] = environment.solved_at
        return {name: threshold for name, threshold in found.items() if threshold is not None}
