"""The run's folder: its paths, and the configuration that it belongs to.

Guarantees: a folder belongs to one configuration; a different one is refused, with the differences and the remedy; only a
folder that holds a run is ever deleted; secrets are readable only by their owner.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from services.config import ConfigError, RunConfig, digest, load_resolved, to_toml
from services.config.differences import differing
from services.config.load import NOT_DEFINING
from services.console.code import keep_code
from services.console.doctor import Finding, fault
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.console.paths import RunPaths
from services.console.run.secrets import kept_secret
from services.runtime.checkpoints import CheckpointFolder

SHOWN = 4  # differing keys that a message names


class RunFolder(RunPaths):
    """The folder `run.dir/run.name` of a run."""

    @classmethod
    def of(cls, config: RunConfig) -> RunFolder:
        """Return the folder of a run."""
        return cls(Path(config.run.dir) / config.run.name)

    def held(self) -> RunConfig | None:
        """Return the configuration of the run in the folder, if any. Raise `ConsoleError` if this version cannot read it."""
        if not self.config.exists():
            return None
        try:
            return load_resolved(self.config)
        except ConfigError as error:
            what = f"a configuration that this version cannot read ({error})"
            raise ConsoleError(self._refusal(what, "choose another run.name"), EXIT_CONFIG) from None  # grpo fork reads it too

    def check(self, config: RunConfig) -> bool:
        """Return whether the folder already holds this run. Raise `ConsoleError` if it holds a different one."""
        if (held := self.held()) is None:
            return False
        if digest(held) != digest(config):
            what = f"a run with another configuration: {_differences(held, config)}"
            remedy = "choose another run.name, continue from a checkpoint with grpo fork,"
            raise ConsoleError(self._refusal(f"{what}. These keys define the run and cannot change", remedy), EXIT_CONFIG)
        return True

    def holds(self, config: RunConfig) -> bool:
        """Return whether the folder holds the run of this configuration."""
        try:
            held = load_resolved(self.config)
            return digest(held) == digest(config)
        except ConfigError:
            return False

    def trained_steps(self) -> int:
        """Return how many steps the run has trained, by its latest checkpoint."""
        checkpoints = CheckpointFolder(self.checkpoints)
        steps = [saved.step for saved in checkpoints.complete()]
        named = checkpoints.named().removeprefix("step-")
        if named.isdigit() and int(named) in steps:
            return int(named) + 1
        return max(steps, default=-1) + 1

    def _refusal(self, what: str, remedy: str) -> str:
        return f"{self.path} contains {what}; {remedy} or delete it with --fresh"

    def check_clearable(self) -> list[Path]:
        """Return what is in the folder besides the lock. Refuse a folder that holds anything but a run."""
        things = [entry for entry in self.path.iterdir() if entry.name != "lock"]
        if things and not self.config.exists():
            names = ", ".join(sorted(entry.name for entry in things)[:SHOWN])
            raise ConsoleError(
                f"{self.path} was not deleted: it contains {names} but no run (no config.toml); delete it by hand", EXIT_CONFIG
            )
        return things

    def clear(self) -> None:
        """Delete the run, except for the lock. Refuse a folder that holds anything but a run."""
        things = self.check_clearable()
        # Delete the configuration last, so that an interrupted deletion can be repeated.
        for entry in sorted(things, key=lambda entry: entry == self.config):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def write(self, config: RunConfig) -> RunConfig:
        """Write the resolved configuration and the API tokens, and copy the verifiers' code. Return the configuration with it."""
        config = keep_code(config, self.code)
        self.logs.mkdir(parents=True, exist_ok=True)
        for token in (self.token, self.read_token):
            kept_secret(token)
        temporary = self.config.with_suffix(".new")
        temporary.write_text(to_toml(config), encoding="utf-8")
        temporary.replace(self.config)
        return config


def resolve(config: RunConfig, folder: RunFolder, redis_url: str = "", password_file: str = "") -> RunConfig:
    """Return the configuration that services receive, with Redis, the secrets and the trainer's host on this machine."""
    return config.with_values(
        {
            "redis.url": redis_url or config.redis.url,
            "redis.password_file": password_file or config.redis.password_file,
            "api.token_file": config.api.token_file or str(folder.token.resolve()),
            "api.read_token_file": config.api.read_token_file or str(folder.read_token.resolve()),
            "sync.host": config.sync.host or "127.0.0.1",
        }
    )


def check_steps(config: RunConfig, trained: int, restore: int | None = None) -> None:
    """Raise `ConsoleError` if run.steps is less than `trained`. `restore`: the checkpoint up to which that is."""
    if config.run.steps < trained:
        what = "the run has trained" if restore is None else f"up to checkpoint {restore} the run has trained"
        raise ConsoleError(f"run.steps = {config.run.steps}, but {what} {trained}: raise it", EXIT_CONFIG)


def check_redis(config: RunConfig, url: str) -> Iterator[Finding]:
    """Find keys of `[redis]` that have no effect: `url` is empty, so that the run starts its own server."""
    for key in ("password_file", "ca_file") if not url else ():
        if value := getattr(config.redis, key):
            why = "without redis.url, because the run starts its own server"
            yield fault("Redis", f"redis.{key} = {value!r} has no effect {why}", "set redis.url, or remove the key")


def _differences(held: RunConfig, asked: RunConfig) -> str:
    found = differing(*(config.model_dump(mode="json", exclude=NOT_DEFINING) for config in (held, asked)))
    shown = [f"{key} is {there!r} there and {here!r} here" for key, (there, here) in list(found.items())[:SHOWN]]
    return "; ".join(shown) + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
