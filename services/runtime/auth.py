"""Secrets come from files or the environment, never from the configuration itself, and are never logged."""

from __future__ import annotations

import os
from pathlib import Path

from services.protocol.config import ConfigError, RunConfig

API_TOKEN_ENV = "GRPO_API_TOKEN"
REDIS_PASSWORD_ENV = "GRPO_REDIS_PASSWORD"


def api_token(config: RunConfig) -> str:
    """The bearer token of mutating calls. None configured is an error, not an open door."""
    token = _read("api.token_file", config.api.token_file, API_TOKEN_ENV)
    if not token:
        raise ConfigError(f"no API token: set api.token_file or the environment variable {API_TOKEN_ENV}")
    return token


def redis_password(config: RunConfig) -> str | None:
    """The password of Redis, or None."""
    return _read("redis.password_file", config.redis.password_file, REDIS_PASSWORD_ENV) or None


def _read(key: str, path: str, variable: str) -> str:
    if not path:
        return os.environ.get(variable, "").strip()
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} = {path!r} cannot be read: {error}") from None
