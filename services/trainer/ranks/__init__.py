"""The trainer's ranks: their identity, how they connect, and how they agree.

Guarantees: after `agree` every rank raises or none does, so no rank is left waiting in a collective that others skipped. Rank 0
names the next operation and all perform it, so their collectives always match.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

STOP = "grpo/stop"
"""Key in the store through which the ranks connect. It exists once a rank has asked for the end of all."""


TIMEOUT_S = 1800.0
"""Limit of a collective among the ranks: longer than any step's slowest part, such as the first compilation."""


Operation = Callable[[Any], object]


@dataclass(frozen=True)
class World:
    """One rank's place among all. `local_rank` counts on its machine and selects its GPU."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    host: str = "127.0.0.1"  # where rank 0 listens for the others
    port: int = 29500

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun and Kubernetes set them."""
        values = os.environ if environ is None else environ
        return cls(
            rank=int(values.get("RANK", "0")),
            size=int(values.get("WORLD_SIZE", "1")),
            local_rank=int(values.get("LOCAL_RANK", "0")),
            host=values.get("MASTER_ADDR", "127.0.0.1"),
            port=int(values.get("MASTER_PORT", "29500")),
        )

    @property
    def device(self) -> torch.device:
        """Return the device this rank trains on."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def join(self, timeout_s: float = TIMEOUT_S) -> None:
        """Join the other ranks. Every later collective fails after `timeout_s`."""
        if torch.cuda.is_available():
            torch.cuda.set_device(self.device)
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }
        import deepspeed

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "gloo":
            # Its shared-memory collectives serve inference only, and would cost a compiler and 30 s on every new machine. With
            # GPUs it does not have them, and this line would start compilers to find out which kernels can be built.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timedelta(seconds=timeout_s))


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank. Collective."""
    if dist.get_world_size() == 1:  # spares a GPU the copies and waits of a collective
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value, on every rank. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def agree(problem: str, error: type[Exception]) -> None:
    """Raise `error` on every rank if any of them has a `problem`. Collective."""
    refuse(gather(problem), error)


def refuse(problems: Iterable[str], error: type[Exception]) -> None:
    """Raise `error` if any of the ranks' `problems` is not empty."""
    if found := [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]:
        raise error("; ".join(found))


def total(values: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place. Collective."""
    dist.all_reduce(values)
    return values


def maximum(values: torch.Tensor) -> torch.Tensor:
    """Take the maximum over ranks, in place. Collective."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def request_stop() -> None:
    """Ask rank 0 to finish its step, save and end all ranks, as it does after a SIGTERM of its own. Not collective."""
    _get_default_store().set(STOP, "1")


def stop_requested() -> bool:
    """Return whether any rank has asked rank 0 to stop. Not collective."""
    return dist.is_initialized() and bool(_get_default_store().check([STOP]))


class RankCommands:
    """Holds this rank's operations by name; `wait` and `end` are built in."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self._operations = dict(operations)
        self._in_step = True  # whether the others wait for rank 0's next command

    def lead(self, name: str, argument: Any = 0) -> object:
        """Rank 0: run `name` on all ranks. Returns this rank's result."""
        from_rank_0((name, argument))
        self._in_step = False
        result = self._operations[name](argument)
        self._in_step = True
        return result

    def keep_waiting(self) -> None:
        """Rank 0: notify the others that there is nothing to do yet, before their collective times out."""
        from_rank_0(("wait", 0))
        self._in_step = True

    def dismiss(self) -> None:
        """Rank 0: let the others exit.

        After a failed operation they may be waiting inside it, where no command reaches them; their collective then ends when
        rank 0 exits.
        """
        if self._in_step:
            from_rank_0(("end", 0))

    def follow(self) -> None:
        """Other ranks: perform rank 0's commands until `end`."""
        while True:
            name, argument = from_rank_0(("", 0))
            if name == "end":
                return
            if name != "wait":
                self._operations[name](argument)
