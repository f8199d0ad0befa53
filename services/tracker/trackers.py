"""Opens trackers by name. Each imports its own library when it is opened."""

from __future__ import annotations

from pathlib import Path

from services.config import RunConfig
from services.tracker.tracker import Tracker


def open_tracker(name: str, config: RunConfig, folder: Path, identity: str) -> Tracker:
    """Return the tracker `name`, which writes under `folder`; `identity` is the run's, the same after every restart."""
    if name == "tensorboard":
        from services.tracker.event_files import EventFiles

        return EventFiles(folder / name)
    from services.tracker.wandb_run import WandbRun

    return WandbRun(config, folder, identity)  # creates a folder `wandb` in it
