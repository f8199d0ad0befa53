"""The chart's settings of the sandboxes, from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from services.config import ConfigError

TEMPLATE_ENV = "GRPO_SANDBOX_TEMPLATE"
NAMESPACE_ENV = "GRPO_SANDBOX_NAMESPACE"
RELEASE_ENV = "GRPO_RELEASE"
WARM_ENV = "GRPO_SANDBOX_WARM"
APPLICATION = "grpo-sandbox"
"""Its pods' `app.kubernetes.io/name`: it differs from that of the release's other pods, which may reach one another."""


@dataclass(frozen=True)
class SandboxSettings:
    """Which sandboxes the service keeps."""

    template: str
    """Name of the PodTemplate, with which the pods' names begin."""
    namespace: str
    """Where both are. Empty: the service's own."""
    release: str
    warm: int

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of all sandboxes of the release."""
        return {"app.kubernetes.io/name": APPLICATION, "app.kubernetes.io/instance": self.release}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the environment. Raises `ConfigError` for invalid values."""
        for name in (TEMPLATE_ENV, RELEASE_ENV):
            if not environ.get(name):
                raise ConfigError(f"{name} is not set: set it to the name of the {_MEANT[name]}, as the chart does")
        text = environ.get(WARM_ENV, "0")
        if not text.isdecimal():
            raise ConfigError(f"{WARM_ENV} = {text!r} must be a number of pods, at least 0")
        return cls(environ[TEMPLATE_ENV], environ.get(NAMESPACE_ENV, ""), environ[RELEASE_ENV], int(text))


_MEANT = {TEMPLATE_ENV: "PodTemplate that sandboxes are made from", RELEASE_ENV: "release"}
