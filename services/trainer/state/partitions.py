"""The weights and optimizer state that this rank holds, by parameter, for any ZeRO stage.

Guarantees: `held` and `put_back` cover everything that training depends on: the float32 weights that AdamW steps, its moments and
step counts. Frozen parameters are left out. Learning rate, betas and decay come from the configuration.

DeepSpeed 0.19 keeps a rank's share in these places: in stages 1 and 2, and in its bfloat16 optimizer, behind `_hp_mapping` of
each parameter; in stage 3 in `fp32_partitioned_groups_flat`, at `grad_position`. Its universal checkpoints use the same two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.trainer.ranks import World
from services.trainer.state import archive
from services.trainer.state.archive import Archive, Flat, Piece

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of torch's AdamW


@dataclass(frozen=True)
class Partition:
    """A tensor that AdamW steps (the key of its state) and the pieces of parameters in it."""

    master: Tensor
    pieces: list[Piece]


def held(engine: Any, world: World) -> Iterator[Flat]:
    """Yield what this rank must write. Where all ranks hold the same, each writes a share."""
    partitions, state = _partitions(engine, world), _adamw(engine).state
    if _keeps_all(engine):
        sizes = {partition.pieces[0].name: partition.master.numel() for partition in partitions}
        mine = archive.share(sizes, world.rank, world.size)
        partitions = [partition for partition in partitions if partition.pieces[0].name in mine]
    for partition in partitions:
        of = state.get(partition.master, {})
        moments = {kind: of[kind] for kind in MOMENTS if kind in of}
        yield Flat(partition.pieces, {WEIGHTS: partition.master} | moments, int(of.get("step", 0)))


@torch.no_grad()
def put_back(engine: Any, world: World, saved: Archive) -> None:
    """Fill this rank's partitions from an archive that any number of ranks wrote. Raises `StateError`.

    The model's weights stay unchanged until `show` is called.
    """
    state = _adamw(engine).state
    for partition in _partitions(engine, world):
        flat = partition.master.detach().view(-1)
        for piece in partition.pieces:
            saved.copy(WEIGHTS, piece, flat)
        steps = {piece.name: saved.step(piece.name) for piece in partition.pieces}
        count = max(steps.values())
        if not count:
            continue
        of = state[partition.master]
        for kind in MOMENTS:
            moment = of.setdefault(kind, torch.zeros_like(partition.master))
            for piece in partition.pieces:
                if steps[piece.name]:
                    saved.copy(kind, piece, moment.view(-1))
        of["step"] = torch.tensor(float(count), dtype=torch.float32, device=partition.master.device)


@torch.no_grad()
def show(engine: Any) -> None:
    """Set the model's weights to those of the partitions, rounded to their dtype. Collective."""
    if _keeps_all(engine):
        return  # the model's weights are what AdamW steps
    if not _splits_parameters(engine):
        engine.optimizer.update_lp_params()
        return
    engine.optimizer.checkpoint_event_prologue()  # drop gathered copies
    for parameter in _trained(engine).values():
        group, offset, count = engine.optimizer.grad_position[engine.optimizer.get_param_id(parameter)]
        parameter.ds_tensor.data.view(-1).copy_(engine.optimizer.fp32_partitioned_groups_flat[group].narrow(0, offset, count))
    engine.optimizer.checkpoint_event_epilogue()


def _partitions(engine: Any, world: World) -> list[Partition]:
    """Return this rank's partitions that hold more than padding."""
    if _keeps_all(engine):
        return [Partition(parameter, [archive.whole(name, parameter)]) for name, parameter in _trained(engine).items()]
    pieces: dict[Tensor, list[Piece]] = {}
    for name, parameter in _trained(engine).items():
        if _splits_parameters(engine):
            group, offset, size = engine.optimizer.grad_position[engine.optimizer.get_param_id(parameter)]
            first = world.rank * size  # every parameter is split over all ranks, the last with padding
            count = min(size, parameter.ds_numel - first)
            if count > 0:
                piece = Piece(name, first, count, offset)
                pieces.setdefault(engine.optimizer.fp32_partitioned_groups_flat[group], []).append(piece)
        elif (mapping := parameter._hp_mapping) is not None:
            inside, at = mapping.lp_fragment_address, mapping.hp_fragment_address
            master = _adamw(engine).param_groups[mapping.param_group_index]["params"][0]
            pieces.setdefault(master, []).append(Piece(name, inside.start, inside.numel, at.start))
    return [Partition(master, held) for master, held in pieces.items()]


def _adamw(engine: Any) -> torch.optim.Optimizer:
    return engine.optimizer if _keeps_all(engine) else engine.optimizer.optimizer


def _keeps_all(engine: Any) -> bool:
    """Return whether this rank has all of the optimizer's state because DeepSpeed steps torch's AdamW itself."""
    return isinstance(engine.optimizer, torch.optim.Optimizer)


def _splits_parameters(engine: Any) -> bool:
    """Return whether ZeRO runs in stage 3."""
    return hasattr(engine.optimizer, "fp32_partitioned_groups_flat")


def _trained(engine: Any) -> dict[str, Any]:
    return {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
