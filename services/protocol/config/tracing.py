"""OpenTelemetry traces of groups (docs/operating.md). They are sent from beside the loops and never hold one up."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from services.protocol.config.base import Section


class Tracing(Section):
    """A trace for every group, from its ticket to the steps that train it; needs the extra `tracing` (docs/operating.md)."""

    endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Where spans are sent by OTLP over HTTP, such as `http://collector:4318/v1/traces`; empty: no trace is made."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the groups that get a trace."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.share != 1.0 and not self.endpoint:
            raise ValueError(f"tracing.share = {self.share} has no effect without tracing.endpoint: set that, or remove it")
        return self
