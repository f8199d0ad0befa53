"""The interface between a weight-sync round and the inference engine that receives weights."""

from __future__ import annotations

from typing import Protocol

from services.protocol.messages import CHANGED, Round
from services.runtime.loops import Broken


class EngineDead(Broken):
    """The engine cannot continue: the process must exit and be restarted. The message says why.

    A process with a stuck engine that stayed alive would keep its leases forever.
    """


class TransferFailed(Exception):
    """This group or transfer failed but the engine is alive. Join a group of another epoch and receive a full update."""


class WeightsChanged(TransferFailed):
    """The received weights differ from those sent, and were rejected. `tensor` is the first weight that differs."""

    def __init__(self, tensor: str) -> None:
        super().__init__(CHANGED + tensor)
        self.tensor = tensor


class WeightReceiver(Protocol):
    """Takes complete sets of weights, between `pause` and `resume`."""

    @property
    def whole(self) -> bool:
        """Return whether all weights are of one version. After a broken transfer it is False, and `resume` is refused until a
        full update.
        """
        ...

    @property
    def fetched_bytes(self) -> int | None:
        """Return the bytes that the last `stage` read from a store of versions; None without one."""
        ...

    async def pause(self) -> None:
        """Stop sampling; completions stay, with their KV cache. Raises `TransferFailed`."""
        ...

    async def resume(self) -> None:
        """Resume sampling. Raises `TransferFailed` if the weights are not whole."""
        ...

    async def join(self, round: Round, first_rank: int) -> None:
        """Join the weight group of the round's epoch with ranks first_rank … first_rank + world - 1.

        Returns when every rank of the group is connected; sampling continues meanwhile. Leaves the previous group first. Raises
        `TransferFailed` after `sync.answer_s`, or `EngineDead`.
        """
        ...

    @property
    def stages(self) -> bool:
        """Return whether `stage` receives while sampling; False if weights are written as they are received."""
        ...

    async def stage(self, version: int, limit_s: float | None = None) -> None:
        """Receive one full set of weights while sampling, for `receive` to apply; the current weights stay as they are.

        `limit_s` replaces `sync.deadline_s`. Call it only if `stages` is true and after joining. Raises like `receive`.
        """
        ...

    async def receive(self, version: int) -> None:
        """Apply one full set of weights, either staged or received now, and stamp it `version`. Call it only while paused and
        joined.

        Raises `WeightsChanged` if a checksum differs, `TransferFailed` after `sync.deadline_s` or when the group breaks (see
        `whole` for both), or `EngineDead`.
        """
        ...
