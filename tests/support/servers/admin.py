"""The administrator of a run's Redis."""

from __future__ import annotations

from pathlib import Path

from services.config import RunConfig
from services.http.credentials import redis_password


def admin_password(config: RunConfig) -> str | None:
    """Return the password of the default user of the server that `grpo run` started, or of the one that it was given."""
    users = Path(config.redis.password_file or "none")
    return (users.parent / "password").read_text().strip() if users.is_dir() else redis_password(config)
