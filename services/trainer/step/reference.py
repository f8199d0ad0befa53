"""The reference policy: the model of `model.path`, either frozen or as a running average of the policy that starts there.

With adapters, the reference is the policy without them, and no second model is loaded.

Guarantees: the average is kept in float32 whatever the dtype of the weights, so that small steps are not rounded away; under
ZeRO-3 every rank averages the shard it holds and nothing is gathered; `load` restores what `save` wrote bit for bit.

reference <- (1 - alpha) x reference + alpha x policy is the average of Polyak and Juditsky (1992) with exponential weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.config import RunConfig
from services.trainer.model import lora
from services.trainer.model.policy_network import Scorer
from services.trainer.ranks import World
from services.trainer.state import archive
from services.trainer.state.archive import Archive, Flat, Piece
from services.trainer.step import deepspeed_engine as engine

logger = logging.getLogger(__name__)

AVERAGE = "reference"
"""Stem of the names of its files, and the kind under which they store the average."""


class ReferencePolicy:
    """Holds the reference of one rank. Call `module` as you call the policy's engine."""

    def __init__(self, config: RunConfig, load: Callable[[], Scorer], policy: Any, world: World) -> None:
        """`load` loads a new copy of the model; `policy` is DeepSpeed's engine."""
        self._path, self._alpha, self._world = config.model.path, config.reference.alpha, world
        self._average: dict[str, Tensor] = {}  # empty for a frozen reference
        if config.lora.rank:
            self.module: Any = lora.Unadapted(policy)
            return
        scorer = load()
        self.module = engine.start_reference(config, scorer, world.device)
        self._reference: dict[str, Any] = dict(scorer.named_parameters())  # sharded like the policy's
        self._policy: dict[str, Any] = dict(policy.module.named_parameters())
        if self._alpha:
            self._average = {name: _held(parameter).detach().float() for name, parameter in self._reference.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the policy, after a training step."""
        for name, average in self._average.items():
            average.lerp_(_held(self._policy[name]).float(), self._alpha)
        self._show()

    def save(self, folder: Path) -> list[str]:
        """Write what this rank holds of the average, and return the names of the files. Where all ranks hold the same, each
        writes a share; a frozen reference is `model.path` itself and needs none. Raises `StateError`.
        """
        if not self._average:
            return []
        mine = self._average.keys()
        if not self._sharded:
            sizes = {name: average.numel() for name, average in self._average.items()}
            mine = archive.share(sizes, self._world.rank, self._world.size)
        name = f"{AVERAGE}-{self._world.rank}.pt"
        archive.write(folder / name, [Flat([self._piece(name)], {AVERAGE: self._average[name]}) for name in mine])
        return [name]

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, with any number of ranks. Raises `StateError`.

        If the folder has no average, because it was written without one, the average starts at `model.path` and a warning is
        logged.
        """
        if not self._average:
            return
        if any(folder.glob(f"{AVERAGE}-*.pt")):
            saved = Archive(folder, AVERAGE)
            for name, average in self._average.items():
                saved.copy(AVERAGE, self._piece(name), average.view(-1))
            self._show()
        elif self._world.rank == 0:
            logger.warning("%s has no averaged reference: starting the average from model.path = %r", folder, self._path)

    def _piece(self, name: str) -> Piece:
        """Return what this rank holds of a parameter, without ZeRO-3's padding."""
        parameter = self._reference[name]
        if not self._sharded:
            return archive.whole(name, parameter)
        first = self._world.rank * self._average[name].numel()
        return Piece(name, first, max(0, min(self._average[name].numel(), parameter.ds_numel - first)), 0)

    @property
    def _sharded(self) -> bool:
        return any(hasattr(parameter, "ds_tensor") for parameter in self._reference.values())

    @torch.no_grad()
    def _show(self) -> None:
        """Set the module's weights to the average, rounded to their dtype."""
        for name, average in self._average.items():
            parameter = self._reference[name]
            held = _held(parameter)
            if held.data_ptr() != average.data_ptr():  # float32 weights are the average itself
                held.copy_(average)
            if hasattr(parameter, "ds_tensor"):
                _forget(parameter)


def _held(parameter: Any) -> Tensor:
    """Return what this rank holds of a parameter: its shard under ZeRO-3, otherwise all of it."""
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.data


def _forget(parameter: Any) -> None:
    """Drop a gathered copy of a parameter (ZeRO-3 keeps small ones), which the new shards have made stale."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if parameter.ds_status == ZeroParamStatus.AVAILABLE:
        parameter.partition()
