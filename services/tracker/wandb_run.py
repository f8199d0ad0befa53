"""A run at Weights & Biases, online or as files for `wandb sync`.

Guarantees: a resumed run keeps its id. W&B's own process writes or sends the records and loses some if this process is killed;
all records that were not properly finished are therefore written again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_SILENT", "true")  # keeps its output out of the log; it raises its errors
os.environ.pop("WANDB_SERVICE", None)  # inherited from the parent process: a run that a killed process had there stays "in use"
import numpy as np
import structlog
import wandb  # pyright: ignore

from services.config import RunConfig
from services.config.secrets import without_secrets
from services.groups.histograms import Bins, edges, separated
from services.runtime.tracking import wandb_mode

log = structlog.get_logger()


class WandbRun:
    """One process' part of a run: steps over `step`, evaluation rounds over `eval/version`."""

    durable = False

    def __init__(self, config: RunConfig, folder: Path, identity: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mode = wandb_mode(os.environ)
        self._run = wandb.init(
            project=config.tracking.wandb,
            name=config.run.name,
            id=identity,
            mode=mode,
            resume="allow" if mode == "online" else None,
            dir=folder,
            config=without_secrets("", config.model_dump(mode="json", exclude={"redis", "api"})),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
            ),
        )
        if mode == "offline" and len(parts := sorted((folder / "wandb").glob(f"offline-run-*-{identity}"))) > 1:
            command = f"wandb sync --id {identity} {' '.join(map(str, parts))}"
            log.info("W&B's files of this run are in several folders: upload them together", command=command)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="eval/version")

    def write(self, steps: Sequence[dict[str, float]], rounds: Sequence[dict[str, float]]) -> None:
        """Log every record."""
        for record in (*steps, *rounds):
            scalars, histograms = separated(record)
            self._run.log(scalars | {name: _histogram(name, bins) for name, bins in histograms.items()})

    def close(self) -> None:
        """Wait until W&B has written or sent everything."""
        self._run.finish()
        wandb.teardown()  # waits for W&B's process to end: `finish` may return before it has written its file


def _histogram(name: str, bins: Bins) -> Any:
    limits, counts = edges(name.split("/")[1], bins)
    return wandb.Histogram(np_histogram=(np.array(counts), np.array(limits)))
