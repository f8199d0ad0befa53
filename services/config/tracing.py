"""OpenTelemetry traces of groups (docs/operating.md). They are sent from beside the loops and never hold one up."""

from __future__ import annotations

from pydantic import Field

from services.config.base import Section


class Tracing(Section):
    """A trace for every group, from its ticket to the steps that train it; needs the extra `tracing` (docs/operating.md)."""

    endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Where spans are sent by OTLP over HTTP, such as `http://collector:4318/v1/traces`; empty: no trace is made."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the groups that get a trace."""
