"""The reference policy: the model of `model.path`, frozen, or a running average of the policy that begins there.

With adapters it is the policy without them, and no second model is loaded.

Guarantees: the average is kept in float32 whatever the weights are, so that small steps are not rounded away; under ZeRO-3
every rank averages the shard it holds, and nothing is gathered; what `save` wrote is put back to the bit.

reference <- (1 - alpha) x reference + alpha x policy is the average of Polyak and Juditsky (1992) with exponential weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from services.config import RunConfig
from services.config.training import Reference
from services.trainer.model import lora
from services.trainer.model.policy_network import Scorer
from services.trainer.ranks import World
from services.trainer.state import archive
from services.trainer.state.archive import Archive, Flat, Piece
from services.trainer.step import deepspeed_engine as engine

logger = logging.getLogger(__name__)

AVERAGE = "reference"
"""What its files are called, and what lies in them."""


class ReferencePolicy:
    """The reference of one rank. `module` is called as the policy's engine is."""

    def __init__(self, config: RunConfig, load: Callable[[], Scorer], policy: Any, world: World) -> None:
        """`load` loads the model anew; `policy` is DeepSpeed's engine."""
        self._path, self._rank = config.model.path, world.rank
        self._average: PolyakAverage | None = None
        if config.lora.rank:
            self.module: Any = lora.Unadapted(policy)
            return
        scorer = load()
        self.module = engine.start_reference(config, scorer, world.device)
        if config.reference.kind == "polyak":
            self._average = PolyakAverage(scorer, policy.module, config.reference, world)

    def after(self, step: int) -> None:
        """Take in the policy after training step `step`."""
        if self._average is not None:
            self._average.after(step)

    def save(self, folder: Path) -> None:
        """Write an average; a frozen reference is `model.path`, and not written. Raises `StateError`."""
        if self._average is not None:
            self._average.save(folder)

    def load(self, folder: Path) -> None:
        """Put back what `save` wrote, with any number of ranks. Raises `StateError`.

        An average of which the folder knows nothing, as it was written without one, stays at `model.path`, with a warning.
        """
        if self._average is None:
            return
        if any(folder.glob(f"{AVERAGE}-*.pt")):
            self._average.load(Archive(folder, AVERAGE))
        elif self._rank == 0:
            logger.warning('%s has no average of reference.kind = "polyak": it begins at model.path = %r', folder, self._path)


class PolyakAverage:
    """Keeps `module`, the reference, at the average of the weights of `policy`. Both have the same parameters, sharded alike."""

    def __init__(self, module: nn.Module, policy: nn.Module, options: Reference, world: World) -> None:
        self._options, self._world = options, world
        self._reference = dict(module.named_parameters())
        self._policy = dict(policy.named_parameters())
        self._average = {name: _held(parameter).detach().float() for name, parameter in self._reference.items()}

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Take in the weights after training step `step` (from 0), if it is one of every `reference.every_steps`."""
        if (step + 1) % self._options.every_steps:
            return
        for name, average in self._average.items():
            average.lerp_(_held(self._policy[name]).float(), self._options.alpha)
        self._show()

    def save(self, folder: Path) -> None:
        """Write what this rank holds; of what all ranks hold, each writes a share. Raises `StateError`."""
        mine = self._average.keys()
        if not self._sharded:
            sizes = {name: average.numel() for name, average in self._average.items()}
            mine = archive.share(sizes, self._world.rank, self._world.size)
        held = [Flat([self._piece(name)], {AVERAGE: self._average[name]}) for name in mine]
        archive.write(folder / f"{AVERAGE}-{self._world.rank}.pt", held)

    def load(self, saved: Archive) -> None:
        """Put back what `save` wrote, with any number of ranks. Raises `StateError`."""
        for name, average in self._average.items():
            saved.copy(AVERAGE, self._piece(name), average.view(-1))
        self._show()

    def _piece(self, name: str) -> Piece:
        """What this rank holds of a parameter, without ZeRO-3's padding."""
        parameter: Any = self._reference[name]
        if not self._sharded:
            return archive.whole(name, parameter)
        first = self._world.rank * self._average[name].numel()
        return Piece(name, first, max(0, min(self._average[name].numel(), parameter.ds_numel - first)), 0)

    @property
    def _sharded(self) -> bool:
        return any(hasattr(parameter, "ds_tensor") for parameter in self._reference.values())

    @torch.no_grad()
    def _show(self) -> None:
        """Make the module's weights those of the average, rounded to their type."""
        for name, parameter in self._reference.items():
            held = _held(parameter)
            if held.data_ptr() != self._average[name].data_ptr():  # float32 weights are the average itself
                held.copy_(self._average[name])
            if hasattr(parameter, "ds_tensor"):
                _forget(parameter)


def _held(parameter: Any) -> Tensor:
    """What this rank holds of a parameter: its shard under ZeRO-3, else all of it."""
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.data


def _forget(parameter: Any) -> None:
    """Drop a gathered copy of a parameter (ZeRO-3 keeps small ones), which its new shards have made stale."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if parameter.ds_status == ZeroParamStatus.AVAILABLE:
        parameter.partition()
