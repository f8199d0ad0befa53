"""The trainer's side of a weight transfer: rank 0 opens a group, every rank takes part in sending.

Guarantees: names are those of the Hugging Face model, tied weights included under each of their names; at most one bucket
is gathered at a time, never the whole model; every wait has a limit. After a failure the group is spent: all ranks have
gone through all gathers, so the ranks stay in step, and rank 0 opens another group.
Receivers: services/generator/gloo_engine.py and nccl_engine.py. Buffers are not sent; training does not change them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch

from services.protocol.config import RunConfig
from services.runtime.collective import (
    NCCL_ID,
    Bucket,
    Deadline,
    TensorMeta,
    broadcast,
    make_group,
    open_store,
    plan_buckets,
    publish_manifest,
)


class SendFailed(Exception):
    """The group could not be made, or a transfer broke; the group is spent. Open another one under a new epoch."""


class WeightSender:
    """Sends the weights of `model`. Every rank makes one; `open`, `connect` and `close_group` are for rank 0.

    Calls block. A round is `open` → tell the members host and port → `connect` → `send` on all ranks, any number of times.
    """

    def __init__(self, config: RunConfig, model: torch.nn.Module, rank: int) -> None:
        self._sync = config.sync
        self._sender = rank == 0
        # A tied weight is listed under each name: an engine that repacks its weights holds two copies, and both must change.
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        metas = [
            TensorMeta(name, str(weight.dtype).removeprefix("torch."), list(getattr(weight, "ds_shape", weight.shape)))
            for name, weight in self._parameters.items()
        ]
        self._manifest = plan_buckets(metas, config.sync.bucket_mib << 20)
        self._partitioned = any(hasattr(weight, "ds_id") for weight in self._parameters.values())
        self._host = config.sync.host or socket.gethostname()
        self._store: Any = None
        self._world_size = 0
        self._group: Any = None  # ProcessGroupGloo, or vLLM's PyNcclCommunicator
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.backend = config.sync.backend
        """`gloo` or `nccl`."""
        if self.backend == "auto":
            self.backend = "nccl" if torch.cuda.is_available() else "gloo"

    @property
    def nbytes(self) -> int:
        """Bytes of one full transfer."""
        return self._manifest.nbytes

    def open(self, world_size: int) -> tuple[str, int]:
        """Rank 0: begin a group of `world_size` ranks, this one included. Returns the host and port where members meet."""
        self.close_group()
        self._world_size = world_size
        self._store = open_store(self._host, self._sync.join_deadline_s)
        publish_manifest(self._store, self._manifest)
        return self._host, self._store.port

    def connect(self) -> None:
        """Rank 0: wait until every member is connected. Raises `SendFailed` after `sync.join_deadline_s`."""
        assert self._store is not None, "open() comes before connect()"
        try:
            if self.backend == "gloo":
                self._group = make_group(
                    self._store, 0, self._world_size, self._host, self._store.port, self._sync.join_deadline_s
                )
            else:
                self._group = _nccl_communicator(self._store, self._world_size, self._sync.join_deadline_s)
        except (RuntimeError, TimeoutError) as error:
            self.close_group()
            raise SendFailed(f"not all of {self._world_size - 1} receiving ranks joined: {error}") from error

    def send(self) -> None:
        """All ranks: send every weight once.

        Raises `SendFailed`, on rank 0 only, after `sync.transfer_deadline_s` or when a member breaks.
        """
        if not self._sender:
            for _ in self._gathered_buckets():
                pass
            return
        try:
            self._send_gloo() if self.backend == "gloo" else self._send_nccl()
        except (RuntimeError, TimeoutError) as error:
            self.close_group()
            raise SendFailed(f"weights could not be sent: {error}") from error

    def close_group(self) -> None:
        """Rank 0: drop the group and its store, if any."""
        group, self._group, self._store = self._group, None, None
        if group is not None and self.backend == "nccl":
            group.destroy()

    def _send_gloo(self) -> None:
        if self._group is None:
            raise RuntimeError("the group is not connected")
        deadline = Deadline(self._sync.transfer_deadline_s)
        largest = max(bucket.nbytes for bucket in self._manifest.buckets)
        if self._buffer.numel() < largest:
            self._buffer = torch.empty(largest, dtype=torch.uint8)
        failure: Exception | None = None
        for bucket in self._gathered_buckets():
            if failure is None:
                try:
                    for name, view in bucket.views(self._buffer):
                        view.copy_(self._parameters[name].detach())
                    broadcast(self._group, self._buffer[: bucket.nbytes], deadline)
                except (RuntimeError, TimeoutError) as error:
                    failure = error  # go on gathering: the other ranks do
        if failure is not None:
            raise failure

    def _send_nccl(self) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_NUM_BUFFERS, packed_nccl_broadcast_producer

        if self._group is None:
            raise RuntimeError("the group is not connected")
        weights = self._gathered_weights()
        abort = threading.Timer(self._sync.transfer_deadline_s, self._group.destroy)
        abort.start()
        try:
            packed_nccl_broadcast_producer(
                iterator=weights,
                group=self._group,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=self._sync.bucket_mib << 20,
                num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
            )
            torch.cuda.synchronize()
            if not self._group.available:
                raise TimeoutError(f"the broadcast took longer than sync.transfer_deadline_s = {self._sync.transfer_deadline_s}")
        finally:
            abort.cancel()
            for _ in weights:  # go on gathering: the other ranks do
                pass

    def _gathered_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self._gathered_buckets():
            for meta in bucket.tensors:
                weight = self._parameters[meta.name].detach()
                yield meta.name, weight.clone() if self._partitioned else weight  # packed after the gather has ended

    def _gathered_buckets(self) -> Iterator[Bucket]:
        """Each bucket, while its weights are whole on this rank. Under ZeRO-3 a collective: all ranks iterate to the end."""
        for bucket in self._manifest.buckets:
            with self._gathered([self._parameters[meta.name] for meta in bucket.tensors]):
                yield bucket

    def _gathered(self, weights: list[torch.nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        if not self._partitioned:
            return contextlib.nullcontext()
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        return GatheredParameters(list({id(weight): weight for weight in weights}.values()))


def _nccl_communicator(store: Any, world_size: int, timeout_s: float) -> Any:
    """Rank 0 of an NCCL group whose members find the unique id in `store`. Made in a thread: NCCL itself waits for ever."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import unpinned_nccl_env

    device = torch.accelerator.current_device_index()
    unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
    store.set(NCCL_ID, unique_id)
    made: list[Any] = []

    def make() -> None:
        torch.accelerator.set_device_index(device)  # the current device is a property of the thread
        with unpinned_nccl_env():
            made.append(PyNcclCommunicator.from_unique_id_bytes(unique_id, 0, world_size, device))

    thread = threading.Thread(target=make, name="nccl-connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not made:
        raise TimeoutError(f"no NCCL group within sync.join_deadline_s = {timeout_s}")
    return made[0]
