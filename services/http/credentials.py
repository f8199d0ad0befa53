"""Reads secrets from files or the environment, never from the configuration itself. Secrets are never logged."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from services.config import ConfigError, RunConfig
from services.protocol.keys import user_name
from services.store.client import Login

API_TOKEN_ENV = "GRPO_API_TOKEN"
API_READ_TOKEN_ENV = "GRPO_API_READ_TOKEN"
REDIS_PASSWORD_ENV = "GRPO_REDIS_PASSWORD"


@dataclass(frozen=True)
class ApiTokens:
    """Bearer tokens of the endpoints, by scope. `operate` includes `read`."""

    operate: str = field(repr=False)
    read: str = field(default="", repr=False)
    """Empty: reading needs no token."""


def api_tokens(config: RunConfig) -> ApiTokens:
    """Return the bearer tokens. Raise `ConfigError` if there is no operate token, or if both scopes share one."""
    operate = _read("api.token_file", config.api.token_file, API_TOKEN_ENV)
    if not operate:
        raise ConfigError(f"no API token: set api.token_file or the environment variable {API_TOKEN_ENV}")
    read = _read("api.read_token_file", config.api.read_token_file, API_READ_TOKEN_ENV)
    if config.api.read_token_file and not read:
        raise ConfigError(
            f"api.read_token_file = {config.api.read_token_file!r} is empty: write a token into it, or remove the key to "
            "allow reading without a token"
        )
    if read == operate:
        raise ConfigError(
            "api.read_token_file and api.token_file contain the same token, so every reader could operate the run: change one"
        )
    return ApiTokens(operate, read)


def redis_login(config: RunConfig, kind: str) -> Login:
    """Return the Redis login of this kind of service: its own user if redis.password_file is a folder."""
    file, ca_file = config.redis.password_file, config.redis.ca_file
    if not holds_users(config):
        return Login(_read("redis.password_file", file, REDIS_PASSWORD_ENV), ca_file=ca_file)
    path, user = Path(file) / kind, user_name(config.run.name, kind)
    password = _read(f"redis.password_file = {file!r}: its file {kind}", str(path), "")
    if not password:
        raise ConfigError(f"redis.password_file: {path} is empty: write into it the password of the user {user}")
    return Login(password, user, ca_file)


def holds_users(config: RunConfig) -> bool:
    """Return whether `redis.password_file` is a folder with the password of each kind of service."""
    return bool(config.redis.password_file) and Path(config.redis.password_file).is_dir()


def redis_password(config: RunConfig) -> str | None:
    """Return the password of the server's default user, which all services share unless each has its own, or None."""
    file = "" if holds_users(config) else config.redis.password_file
    return _read("redis.password_file", file, REDIS_PASSWORD_ENV) or None


def _read(key: str, path: str, variable: str) -> str:
    if not path:
        return os.environ.get(variable, "").strip()
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        where = key if "=" in key else f"{key} = {path!r}"
        raise ConfigError(f"{where} cannot be read: {error}") from None
