"""Where things are in a run's folder, and how a folder is found by name. Imports nothing that takes time."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def told(self, section: str) -> dict[str, Any]:
        """Return a section of the configuration that services read. Raise `ConsoleError` if it cannot be read."""
        try:
            return self.settings()[section]
        except KeyError as error:
            raise ConsoleError(f"{self.config} cannot be read: {error}", EXIT_CONFIG) from None

    def keys(self, *names: str) -> list[Any]:
        """Return keys of the configuration that services read, such as `run.steps`. Raise `ConsoleError` if it cannot be read.

        A key that it leaves out, as on a cluster, has its default. Nothing is validated: that takes longer than most commands.
        """
        tree, found = self.settings(), list[Any]()
        for section, _, key in (name.partition(".") for name in names):
            table = tree.get(section, {})
            found.append(table[key] if key in table else _default(section, key))
        return found

    def settings(self) -> dict[str, Any]:
        """Return the configuration that services read, as it is in the file. Raise `ConsoleError` if it cannot be read."""
        try:
            return tomllib.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConsoleError(f"{self.config} cannot be read: {error}", EXIT_CONFIG) from None


def _default(section: str, key: str) -> Any:
    from services.config import RunConfig

    described: Any = RunConfig.model_fields[section].annotation
    return described.model_fields[key].get_default(call_default_factory=True)


def find(run: str) -> RunPaths | None:
    """Return the folder of a run, by path or name. For an empty name: that of the run this pod belongs to, or the newest."""
    if not run and (given := os.environ.get(CONFIG_ENV)):
        said = RunPaths(Path(given).parent, Path(given)).told("run")
        return RunPaths(Path(said.get("dir", RUNS)) / said.get("name", "run"), Path(given))
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
