"""Experiment trackers (docs/metrics.md), the sample log (docs/samples.md) and traces of groups (docs/operating.md).

All follow the run from outside its loops and never block one.
"""

from __future__ import annotations

from pydantic import Field

from services.config.base import Section


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
