"""Where things are in a run's folder, and how a folder is found by name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from services.config import RunConfig, load_resolved
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.runtime.process_tools import CONFIG_ENV

RUNS = Path("runs")  # default of run.dir


@dataclass(frozen=True)
class RunPaths:
    """Paths under `run.dir/run.name`."""

    path: Path
    given: Path | None = None  # path of the configuration, if it is not in the folder

    @property
    def config(self) -> Path:
        """Path of the resolved configuration that services read."""
        return self.given or self.path / "config.toml"

    @property
    def changes(self) -> Path:
        """File with one line for each time that the run was resumed with other settings."""
        return self.path / "changes.jsonl"

    @property
    def code(self) -> Path:
        """Folder of the files that hold the verifiers' functions."""
        return self.path / "code"

    @property
    def redis(self) -> Path:
        """Data folder of the run's own Redis server."""
        return self.path / "redis"

    @property
    def token(self) -> Path:
        """File with the bearer token for full access to the REST endpoints."""
        return self.path / "api-token"

    @property
    def read_token(self) -> Path:
        """File with the bearer token for read-only access to the REST endpoints."""
        return self.path / "api-read-token"

    @property
    def redis_password(self) -> Path:
        """File with the password that was part of the Redis address."""
        return self.path / "redis-password"

    @property
    def logs(self) -> Path:
        """Folder with one log file per pod."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """File with one line per step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """File with one line per evaluation round."""
        return self.path / "evaluations.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints that the trainer resumes from."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        """File with the results of the run."""
        return self.path / "summary.json"

    @property
    def condition(self) -> Path:
        """File with the run's condition."""
        return self.path / "condition.json"

    @property
    def report(self) -> Path:
        """Image with charts of the run."""
        return self.path / "report.png"

    @property
    def untrained(self) -> bool:
        """Whether the files of a run here know of no step: it has neither metrics nor checkpoints."""
        metrics = self.metrics.exists() and self.metrics.stat().st_size > 0
        return not metrics and not any(self.checkpoints.glob("step-*"))

    @cached_property
    def settings(self) -> RunConfig:
        """The configuration that services read. Raises `ConfigError` if it cannot be read."""
        return load_resolved(self.config)


def find(run: str) -> RunPaths | None:
    """Return the folder of a run, by path or name. For an empty name: that of the run this pod belongs to, or the newest."""
    if not run and (given := os.environ.get(CONFIG_ENV)):
        own = load_resolved(given).run
        return RunPaths(Path(own.dir) / own.name, Path(given))
    if not run:
        configs = sorted(RUNS.glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
        return RunPaths(configs[-1].parent) if configs else None
    candidates = [RunPaths(Path(run)), RunPaths(RUNS / run)]
    return next((folder for folder in candidates if folder.config.is_file()), None)


def existing(run: str) -> RunPaths:
    """Do the same as `find`, but raise `ConsoleError` when there is no such folder."""
    folder = find(run)
    if folder is None:
        known = ", ".join(sorted(path.parent.name for path in RUNS.glob("*/config.toml"))) or "none"
        what = f"no run {run!r}" if run else "no run"
        raise ConsoleError(f"{what} found: give a run folder, or a name under {RUNS}/ (existing: {known})", EXIT_CONFIG)
    return folder
