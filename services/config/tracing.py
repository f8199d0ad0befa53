"""OpenTelemetry traces of groups (docs/operating.md). They are sent from outside the loops and never block one."""

from __future__ import annotations

from pydantic import Field

from services.config.base import Section


class Tracing(Section):
    """One trace per group, from its ticket to the steps that train on it. Requires the extra `tracing` (docs/operating.md)."""

    endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Endpoint for spans, OTLP over HTTP, such as `http://collector:4318/v1/traces`. Empty: tracing is off."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the groups that are traced."""
