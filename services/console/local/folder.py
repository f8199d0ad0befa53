"""The run's folder: what lies where, and whose it is.

Guarantees: a folder belongs to one configuration; another one is refused with what differs and the remedy; only a folder
that holds a run is ever deleted; secrets are readable by their owner alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from services.config import ConfigError, RunConfig, digest, load_resolved, to_toml
from services.config.load import CARRIED_OUT
from services.config.root import Redis
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.console.local.secrets import kept_secret

SHOWN = 4  # differing keys that a message names


@dataclass(frozen=True)
class RunFolder:
    """Paths under `run.dir/run.name`."""

    path: Path
    given: Path | None = None  # where the configuration lies, if not in the folder

    @classmethod
    def of(cls, config: RunConfig) -> RunFolder:
        """The folder of a run."""
        return cls(Path(config.run.dir) / config.run.name)

    @property
    def config(self) -> Path:
        """The resolved configuration that services read."""
        return self.given or self.path / "config.toml"

    @property
    def redis(self) -> Path:
        """Data of the run's own server."""
        return self.path / "redis"

    @property
    def token(self) -> Path:
        """Bearer token of the REST endpoints, for all they do."""
        return self.path / "api-token"

    @property
    def read_token(self) -> Path:
        """Bearer token of the REST endpoints, to look alone."""
        return self.path / "api-read-token"

    @property
    def redis_password(self) -> Path:
        """Password that came inside a Redis address."""
        return self.path / "redis-password"

    @property
    def logs(self) -> Path:
        """One file a pod."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """One line a step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One line an evaluation round."""
        return self.path / "evaluations.jsonl"

    @property
    def checkpoints(self) -> Path:
        """What the trainer goes on from."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        """What came of it."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The picture."""
        return self.path / "report.png"

    def held(self) -> RunConfig | None:
        """The configuration of the run in it, if there is one. Raises `ConsoleError` when this version cannot read it."""
        if not self.config.exists():
            return None
        try:
            return load_resolved(self.config)
        except ConfigError as error:
            raise ConsoleError(self._refusal(f"a configuration that this version cannot read ({error})"), EXIT_CONFIG) from None

    def check(self, config: RunConfig) -> bool:
        """Whether the folder already holds this very run. Raises `ConsoleError` when it holds another."""
        if (held := self.held()) is None:
            return False
        if digest(held) != digest(config):
            raise ConsoleError(self._refusal(f"a run of another configuration: {_differences(held, config)}"), EXIT_CONFIG)
        return True

    def _refusal(self, what: str) -> str:
        return f"{self.path} holds {what}; choose another run.name, or delete it with --fresh"

    def clear(self) -> None:
        """Delete the run, the lock apart. Refuses a folder with other things than a run in it."""
        things = [entry for entry in self.path.iterdir() if entry.name != "lock"]
        if things and not self.config.exists():
            names = ", ".join(sorted(entry.name for entry in things)[:SHOWN])
            raise ConsoleError(f"{self.path} is not deleted: it holds no run (no config.toml) but {names}", EXIT_CONFIG)
        # The configuration goes last, so that a deletion cut short can be repeated.
        for entry in sorted(things, key=lambda entry: entry == self.config):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def write(self, config: RunConfig) -> None:
        """Write the resolved configuration and the API tokens."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for token in (self.token, self.read_token):
            kept_secret(token)
        temporary = self.config.with_suffix(".new")
        temporary.write_text(to_toml(config), encoding="utf-8")
        temporary.replace(self.config)


def resolve(
    config: RunConfig,
    folder: RunFolder,
    redis_url: str = "",
    password_file: str = "",
    users_dir: str = "",
    backend: str = "",
    web_port: int = 0,
) -> RunConfig:
    """The configuration services are given: where Redis, the secrets and the trainer's host are on this machine."""
    redis = {
        "url": redis_url or config.redis.url,
        "password_file": password_file or config.redis.password_file,
        "users_dir": users_dir or config.redis.users_dir,
    }
    tokens = {
        "token_file": config.api.token_file or str(folder.token.resolve()),
        "read_token_file": config.api.read_token_file or str(folder.read_token.resolve()),
    }
    sync = {"host": config.sync.host or "127.0.0.1", "backend": backend or config.sync.backend}
    return config.model_copy(
        update={
            "redis": config.redis.model_copy(update=redis),
            "api": config.api.model_copy(update=tokens),
            "sync": config.sync.model_copy(update=sync),
            "web": config.web.model_copy(update={"port": web_port or config.web.port}),
        }
    )


def check_redis(config: RunConfig, url: str) -> None:
    """Refuse keys of `[redis]` that nothing reads with the server at `url`, or with the run's own where that is empty."""
    own = not url
    for key in ("password_file", "users_dir", "ca_file", "payload_shards") if own else ("appendfsync",):
        value, default = getattr(config.redis, key), Redis.model_fields[key].default
        if value != default:
            why = (
                "without redis.url, as the run starts a server of its own: set that"
                if own
                else f"on the server at {url}: set it there"
            )
            raise ConfigError(f"redis.{key} = {value!r} has no effect {why}, or remove it, or set its default, {default!r}")


def split_password(url: str) -> tuple[str, str]:
    """A Redis address without its password, and the password: addresses are shown, passwords are not."""
    parts = urlsplit(url)
    if not parts.password:
        return url, ""
    user = f"{parts.username}@" if parts.username else ""
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=user + place)), unquote(parts.password)


def _differences(held: RunConfig, asked: RunConfig) -> str:
    old, new = (_flat(config.model_dump(mode="json", exclude=CARRIED_OUT)) for config in (held, asked))
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    shown = [f"{key} is {old.get(key)!r} there, {new.get(key)!r} here" for key in keys[:SHOWN]]
    return "; ".join(shown) + (f"; and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        tree = {str(i): item for i, item in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {key: value for name, branch in tree.items() for key, value in _flat(branch, f"{prefix}.{name}".strip(".")).items()}
