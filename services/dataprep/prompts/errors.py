"""The error of prompts that cannot be used."""

from __future__ import annotations

from services.config import ConfigError


class DataError(ConfigError):
    """One line that names the key or the place, what is wrong there and the remedy. Raised before a run starts."""
