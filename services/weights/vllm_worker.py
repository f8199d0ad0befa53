"""Weights into a vLLM worker: runs inside the worker process, which loads it as its extension class.

Guarantees of all transports: joining a group runs concurrently with generation and never blocks it; every wait has a limit; after
a failure the worker can join another group and take a full update. Each worker compares checksums of what arrived, before vLLM
fuses and repacks it, with the sender's; `changed` names the first weight that differs. That is a result and not an error: with
several workers an error would end the engine.
A receiver that stages has all weights in host memory, next to generation, before they are applied: a transfer that breaks leaves
the old weights whole. One that streams writes as it receives: a transfer that breaks leaves a mixture, which must not be sampled
until a full update has arrived. The same applies to weights that arrived changed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from services.runtime.portal import begin_in_thread
from services.weights.checksums import WeightChanged
from services.weights.deadline import Deadline, let_go
from services.weights.transport import OWNER, TRANSPORTS, Address, Loaded, make_receiver

PREFIX = "grpo_"
"""What precedes the name of a transport in vLLM's registry."""

logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: "RotaryEmbedding" not in record.getMessage()  # it has no weights, which vLLM reports as a failure to load them
)


@dataclass
class JoinInfo(Address, WeightTransferInitInfo):
    """The address of an epoch's group."""


@dataclass
class ReceiveInfo(WeightTransferUpdateInfo):
    """Time limit of one transfer; its contents are in the group's manifest."""

    timeout_s: float


class TransferEngine(WeightTransferEngine[JoinInfo, ReceiveInfo]):
    """Joins groups and receives weights by any transport, and leaves no half-open reload behind."""

    init_info_cls = JoinInfo
    update_info_cls = ReceiveInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receiver = make_receiver(self.config.backend.removeprefix(PREFIX), self.device)
        self.whole = True
        """Whether the model holds one version's weights. False while they are a mixture: during an update and after a failed
        one.
        """
        self.changed = ""
        """Name of the first weight of the last update that differs from what was sent; empty if none."""
        self._joining: Future[Any] | None = None
        self._staging: Future[Loaded] | None = None
        threading.Thread(target=_die_with_owner, args=(int(os.environ[OWNER]),), name="owner-watch", daemon=True).start()

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Start to join; `state` reports when it is done."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._joining = begin_in_thread(lambda: self.receiver.connect(init_info, rank))

    def state(self) -> dict[str, Any]:
        """Return how joining and staging stand, each `none`, `running`, `done` or the reason why it failed, and what came of the
        last transfer: the first weight that arrived changed, whether the model is whole, and the bytes read from a store.
        """
        return {
            "join": _state(self._joining),
            "stage": _state(self._staging),
            "changed": self.changed,
            "whole": self.whole,
            "fetched_bytes": self.receiver.fetched_bytes,
        }

    @property
    def connection(self) -> Any:
        """Return the connection of the current group. Raises `RuntimeError` without one."""
        if self._joining is None or (state := _state(self._joining)) != "done":
            raise RuntimeError(f"no weight group: {'none' if self._joining is None else state}")
        return self._joining.result()

    def stage(self, version: int, timeout_s: float) -> None:
        """Start to receive; `state` reports when it is done. Raises `RuntimeError` without a group."""
        self.changed = ""
        connection, joined = self.connection, self._joining

        def receive_all() -> Loaded:
            try:
                return self.receiver.take(connection, version, Deadline(timeout_s))
            except WeightChanged as error:
                if self._joining is joined:  # otherwise the caller has moved on to another group
                    self.changed = error.tensor
                raise
            except (RuntimeError, OSError, ValueError, MemoryError) as error:  # the group cannot be used again
                let_go(error)
                if self._joining is joined:
                    self.shutdown()
                raise

        self._staging = begin_in_thread(receive_all)

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        """Reload the model from the staged weights, or from what arrives."""
        if not self.receiver.stages:
            self._stream(Deadline(update_info.timeout_s))
            return
        staging, self._staging = self._staging, None
        if staging is None:
            raise RuntimeError("no weights are staged")
        staged = staging.result(update_info.timeout_s)
        with self.reloading():
            self.load(staged)

    def _stream(self, deadline: Deadline) -> None:
        connection, self.changed = self.connection, ""
        try:
            with self.reloading():
                self.receiver.stream(connection, deadline, self.load)
        except WeightChanged as error:
            self.changed = error.tensor

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Load weights inside this block. However the block ends, another reload can begin."""
        self.whole = False
        initialize_layerwise_reload(self.model)
        try:
            yield
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        self.whole = True

    def load(self, weights: Loaded) -> None:
        """Load checkpoint-format weights into the model; only inside `reloading`."""
        loader: Any = self.model  # every vLLM model has load_weights, but torch.nn.Module does not declare it
        loader.load_weights(weights)

    def start_weight_update(self) -> None:
        """Do nothing: the reload belongs to `receive_weights`."""

    def finish_weight_update(self) -> None:
        """Do nothing: the reload belongs to `receive_weights`."""

    def shutdown(self) -> None:
        """Leave the group. A group that is still being joined is left once it is connected."""
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.add_done_callback(lambda done: None if done.exception() else self.receiver.disconnect(done.result()))


class WorkerExtension:
    """Methods that vLLM mixes into its worker class, for `collective_rpc`."""

    weight_transfer_engine: TransferEngine

    def stage_weights(self, version: int, timeout_s: float) -> str:
        """Start to receive. Returns an empty string, or why it could not start."""
        try:
            self.weight_transfer_engine.stage(version, timeout_s)
        except RuntimeError as error:
            return str(error)
        return ""

    def weight_state(self) -> dict[str, Any]:
        """Return `TransferEngine.state` of this worker."""
        return self.weight_transfer_engine.state()


def _state(task: Future[Any] | None) -> str:
    if task is None:
        return "none"
    if not task.done():
        return "running"
    error = task.exception()
    return "done" if error is None else f"{type(error).__name__}: {error}"


def _die_with_owner(owner: int) -> None:
    """End this process when the generator is gone; otherwise vLLM's engine core would live on, and keep its memory, forever."""
    while any(parent.pid == owner for parent in psutil.Process().parents()):
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


for _name in TRANSPORTS:
    WeightTransferEngineFactory.register_engine(PREFIX + _name, TransferEngine)
