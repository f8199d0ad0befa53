"""Experiment trackers besides the run's own files (docs/metrics.md). They follow the run from outside and never block it."""

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
