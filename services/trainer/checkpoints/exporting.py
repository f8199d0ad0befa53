"""Writes a checkpoint as a Hugging Face folder, from files alone: no server, no ranks, no GPU.

`python -m services.trainer.checkpoints.exporting CONFIG CHECKPOINTS STEP OUT`, which `grpo export` runs. STEP -1 is the latest.

Guarantees: the folder is, to the bit, the one that the run itself would have exported after that step, whatever ranks and ZeRO
stage wrote the checkpoint; every byte of the checkpoint was compared with its manifest; only an earlier export is replaced.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from services.config import ConfigError, RunConfig, load_resolved
from services.runtime import atomic_folders
from services.runtime.atomic_folders import FolderError
from services.runtime.checkpoints import CheckpointError, CheckpointFolder, Saved
from services.trainer.checkpoints.folder import STATE, parameters_digest
from services.trainer.model import export, policy_network
from services.trainer.model.attention import UnsupportedModel
from services.trainer.state import archive
from services.trainer.state.archive import Archive, StateError
from services.trainer.state.partitions import WEIGHTS
from services.trainer.step import policy

FAILURES = (CheckpointError, ConfigError, FolderError, StateError, UnsupportedModel)


def write(config: RunConfig, root: Path, step: int | None, folder: Path) -> Saved:
    """Write the checkpoint of `step` in `root`, by default the latest, to `folder`. Raises one of `FAILURES`."""
    _refuse(folder)
    found = CheckpointFolder(root)
    saved = found.latest() if step is None else found.at(step)
    if saved is None:
        raise CheckpointError(f"{root} has no complete checkpoint: wait for the first, every checkpoint.every_steps steps")
    if saved.refusal:
        raise CheckpointError(saved.refusal)
    scorer = policy_network.load(config.model, config.sampling.temperature, 1, adapters=config.lora)
    if parameters_digest(scorer.model) != saved.manifest.facts["parameters"]:
        raise CheckpointError(
            f"{saved.folder} does not have the parameters of model.path = {config.model.path!r}: use the model that the "
            "run was started with"
        )
    _fill(scorer, Archive(saved.folder / STATE, policy.STATE))
    if problem := export.save(scorer.model, _state(scorer.model), config, saved.step, folder, os.getpid()):
        raise FolderError(problem)
    return saved


def _refuse(folder: Path) -> None:
    """Reject a folder that contains anything other than an earlier export. Raises `FolderError`."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        facts: dict[str, Any] = atomic_folders.read_manifest(folder).facts
    except FolderError:
        facts = {}
    if "step" not in facts or "layout" in facts:  # a checkpoint's manifest has a layout
        raise FolderError(f"{folder} exists and is not an earlier export: delete it, or give another folder")


@torch.no_grad()
def _fill(scorer: nn.Module, saved: Archive) -> None:
    """Set the trained weights to the checkpoint's, rounded to their dtype. Raises `StateError`."""
    for name, parameter in scorer.named_parameters():
        if parameter.requires_grad:
            flat = torch.empty(parameter.numel(), dtype=torch.float32)
            saved.copy(WEIGHTS, archive.whole(name, parameter), flat)
            parameter.copy_(flat.view_as(parameter))


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name. The names of one tied parameter share one tensor."""
    values = module.state_dict(keep_vars=True)
    once = {id(value): value.detach() for value in values.values()}
    return {name: once[id(value)] for name, value in values.items()}


def main(argv: list[str] | None = None) -> int:
    """Write an export, print its description as JSON, and return the exit code."""
    config, root, step, folder = sys.argv[1:] if argv is None else argv
    try:
        saved = write(load_resolved(config), Path(root), None if int(step) < 0 else int(step), Path(folder))
    except FAILURES as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        return 1
    print(json.dumps({"folder": folder, "step": saved.step, "checkpoint": str(saved.folder)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
