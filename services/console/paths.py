"""Where things are in a run's folder, how a folder is found by name, and what a run is doing according to its folder."""

from __future__ import annotations

import contextlib
import os
import time
from functools import cached_property
from pathlib import Path

import msgspec

from services.config import RunConfig, load_resolved
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.console.lock import holder
from services.operations.condition import Condition
from services.runtime.process_tools import CONFIG_ENV

RUNS = Path("runs")  # default of run.dir
UNDER_WAY = ("running", "paused")


class _Noted(msgspec.Struct):
    condition: Condition
    at: float
    """Unix seconds."""


class RunPaths:
    """Paths under `run.dir/run.name`, and the run's condition according to them."""

    def __init__(self, path: Path, given: Path | None = None) -> None:
        """`given`: path of the configuration, if it is not in the folder."""
        self.path, self.given = path, given
        self.config = given or path / "config.toml"
        """The resolved configuration that services read."""
        self.changes = path / "changes.jsonl"
        """One line for each time that the run was resumed with other settings."""
        self.code = path / "code"
        """Folder of the files that hold the verifiers' functions."""
        self.redis = path / "redis"
        """Data folder of the run's own Redis server."""
        self.token, self.read_token = path / "api-token", path / "api-read-token"
        """Bearer tokens of the REST endpoints, for full and for read-only access."""
        self.redis_password = path / "redis-password"
        """The password that was part of the Redis address."""
        self.logs = path / "logs"
        """Folder with one log file per pod."""
        self.metrics = path / "metrics.jsonl"
        """One line per step."""
        self.evaluations = path / "evaluations.jsonl"
        """One line per evaluation round."""
        self.checkpoints = path / "checkpoints"
        """Folder of the checkpoints that the trainer resumes from."""
        self.summary = path / "summary.json"
        """The results of the run."""
        self.condition = path / "condition.json"
        """The run's condition, which `grpo run` keeps up to date."""
        self.report = path / "report.png"
        """Charts of the run."""

    def note(self, condition: Condition) -> None:
        """Write the run's condition, atomically. On a full disk the previous one stays."""
        temporary = self.condition.with_suffix(".new")
        with contextlib.suppress(OSError):  # whether the run still runs, its lock says
            temporary.write_bytes(msgspec.json.encode(_Noted(condition, time.time())) + b"\n")
            temporary.replace(self.condition)

    def condition_now(self) -> Condition:
        """Return the run's condition, without Redis: a run whose console was killed is stopped, whatever its file says."""
        found, noted = holder(self.path), self._noted()
        if found is not None and not found.readers:
            return noted if noted and noted.word in UNDER_WAY else Condition("running")
        return self.condition_left() or Condition("stopped")

    def condition_left(self) -> Condition | None:
        """Return how the last start of the run ended; None if it was never started."""
        noted = self._noted()
        return Condition("stopped", "grpo run was killed") if noted and noted.word in UNDER_WAY else noted

    def _noted(self) -> Condition | None:
        try:
            return msgspec.json.decode(self.condition.read_bytes(), type=_Noted).condition
        except (OSError, msgspec.MsgspecError):
            return None

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
