"""The error for prompts, tokenizers and chat templates that cannot be used."""

from __future__ import annotations

from services.config import ConfigError


class DataError(ConfigError):
    """A one-line error that names the key or the row, the fault and the remedy. It is raised before a run starts."""
