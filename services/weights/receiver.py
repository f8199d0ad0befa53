"""What a weight-sync round asks of whoever receives weights: an inference engine."""

from __future__ import annotations

from typing import Protocol

from services.protocol.messages import CHANGED, Round


class EngineDead(Exception):
    """The engine cannot go on: the process has to end and be started anew. The message says why."""


class TransferFailed(Exception):
    """This group or transfer failed; the engine lives. Join a group of another epoch and receive a full update."""


class WeightsChanged(TransferFailed):
    """What arrived is not what was sent, and was not taken. `tensor` is the first weight that differs."""

    def __init__(self, tensor: str) -> None:
        super().__init__(CHANGED + tensor)
        self.tensor = tensor


class WeightReceiver(Protocol):
    """Takes whole sets of weights, between `pause` and `resume`."""

    @property
    def whole(self) -> bool:
        """Whether all weights are of one version. After a broken transfer False: `resume` is refused until a full update."""
        ...

    async def pause(self) -> None:
        """Stop sampling and forget all KV; completions stay and are prefilled anew after `resume`. Raises `TransferFailed`."""
        ...

    async def resume(self) -> None:
        """Sample again. Raises `TransferFailed` if the weights are not whole."""
        ...

    async def join(self, round: Round, first_rank: int) -> None:
        """Enter the weight group of the round's epoch with ranks first_rank … first_rank + world - 1.

        Returns when every rank of the group is connected; sampling goes on meanwhile. Leaves the former group first.
        Raises `TransferFailed` after `sync.join_deadline_s`, or `EngineDead`.
        """
        ...

    @property
    def stages(self) -> bool:
        """Whether `stage` receives beside sampling; False where weights are written as they are received."""
        ...

    async def stage(self, version: int) -> None:
        """Receive one full set of weights beside sampling, for `receive` to apply; those held stay as they are. Only if `stages`,
        and joined. Raises as `receive`."""
        ...

    async def receive(self, version: int) -> None:
        """Apply one full set of weights, the one staged or else received now, and stamp it `version`. Only while paused and
        joined.

        Raises `WeightsChanged` if `sync.verify` finds them changed, `TransferFailed` after `sync.transfer_deadline_s` or when the
        group breaks (see `whole` for both), or `EngineDead`.
        """
        ...
