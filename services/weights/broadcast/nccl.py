"""Weights between GPUs over an NCCL group, in buckets that vLLM packs.

Guarantees: NCCL itself waits forever, so both ends connect in a thread, and a timer aborts broadcasts: a worker always answers.
The receiver writes into the model as weights arrive, so a transfer that breaks leaves a mixture (vllm_worker.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from services.config import ConfigError
from services.weights.broadcast.rendezvous import arrive, join_store, read_manifest
from services.weights.broadcast.sender import BroadcastSender
from services.weights.buckets import BUCKET_BYTES, Gathered, WeightManifest
from services.weights.checksums import check, checksums
from services.weights.deadline import Abort, Deadline
from services.weights.transport import Address, Loaded, Receiver

VLLM_MODULES = (
    "vllm.distributed.device_communicators.pynccl",
    "vllm.distributed.weight_transfer.packed_tensor",
    "vllm.utils.nccl",
)
"""Modules of vLLM that the sender uses."""

_ID = "nccl_id"
"""Key in the store for the NCCL unique id, raw bytes."""


class NcclSender(BroadcastSender):
    """Broadcasts from GPU memory."""

    backend = "nccl"

    def __init__(self, *given: Any) -> None:
        """Raises `ConfigError` where vLLM is not installed."""
        super().__init__(*given)
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                f'sync.backend = "{self.sync.backend}" sends weights from GPU to GPU, for which the trainer needs vLLM, too: '
                'install it with pip install vllm==0.32.0, or set sync.backend = "gloo"'
            )

    def open(self, fence: int) -> tuple[str, int]:
        """Listen on a free port. Imports vLLM first, which can take longer than members wait for the id of the NCCL group."""
        for name in VLLM_MODULES:
            importlib.import_module(name)
        warnings.filterwarnings("ignore", r"Tensor '.*' has size \d+ bytes, which exceeds buffer_size_bytes")  # it is sent alone
        return super().open(fence)

    def form(self, store: Any, world_size: int) -> Any:
        """Connect in a thread, because NCCL itself waits forever."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.utils.nccl import unpinned_nccl_env

        device, timeout_s = torch.accelerator.current_device_index(), self.sync.answer_s
        unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        store.set(_ID, unique_id)
        made: list[Any] = []

        def make() -> None:
            torch.accelerator.set_device_index(device)  # the current device is a property of the thread
            with unpinned_nccl_env():
                made.append(PyNcclCommunicator.from_unique_id_bytes(unique_id, 0, world_size, device))

        thread = threading.Thread(target=make, name="nccl-connect", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not made:
            raise TimeoutError(f"no NCCL group within {timeout_s:g} s")
        return made[0]

    def broadcast(self, group: Any, gathered: Gathered, deadline: Deadline) -> None:
        """Send with vLLM's producer, which packs the weights into its own buckets; a broadcast past the deadline is aborted."""
        from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_NUM_BUFFERS, packed_nccl_broadcast_producer

        sums = list[torch.Tensor]()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for bucket, tensors in gathered:
                sums.append(checksums(tensors))
                # The producer's streams take turns, and a bucket may be packed on both. They do not wait for each other.
                torch.cuda.current_stream().synchronize()
                for meta, tensor in zip(bucket.tensors, tensors, strict=True):
                    if tensor.is_cuda:  # its memory is not reused before this stream has read it
                        tensor.record_stream(torch.cuda.current_stream())
                    yield meta.name, tensor.clone() if self.partitioned else tensor  # read after the next has been requested

        torch.cuda.synchronize()  # nor do they wait for the stream that trained
        with Abort(deadline.left.total_seconds(), group.destroy) as abort:
            packed_nccl_broadcast_producer(
                iterator=weights(),
                group=group,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=BUCKET_BYTES,
                num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
            )
            torch.cuda.synchronize()
            group.broadcast(torch.cat(sums), src=0)
            torch.cuda.synchronize()
            if abort.passed:
                raise TimeoutError(f"the broadcast took longer than sync.deadline_s = {deadline.seconds:g}")

    def close(self) -> None:
        """Abort the communicator."""
        if self._group is not None:
            self._group.destroy()
        super().close()


class NcclConnection(NamedTuple):
    """A joined group."""

    communicator: Any
    manifest: WeightManifest
    bucket_bytes: int


class NcclReceiver(Receiver):
    """Streams what arrives into the model."""

    stages = False

    def connect(self, address: Address, rank: int) -> NcclConnection:
        """Join the NCCL group and read its manifest."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.utils.nccl import unpinned_nccl_env

        torch.accelerator.set_device_index(self.device)  # the current device is a property of the thread
        store = join_store(address.host, address.port, address.timeout_s)
        arrive(store, rank)
        with unpinned_nccl_env():
            communicator = PyNcclCommunicator.from_unique_id_bytes(store.get(_ID), rank, address.world_size, self.device)
        return NcclConnection(communicator, read_manifest(store), address.bucket_bytes)

    def disconnect(self, connection: NcclConnection) -> None:
        """Abort the communicator."""
        connection.communicator.destroy()

    def stream(self, connection: NcclConnection, deadline: Deadline, load: Callable[[Loaded], None]) -> None:
        """Receive packed buckets and load each as it arrives. A broadcast past the deadline is aborted."""
        from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_NUM_BUFFERS, packed_nccl_broadcast_consumer

        communicator, manifest, bucket_bytes = connection
        names, held = [meta.name for meta in manifest.tensors], list[torch.Tensor]()

        def take(weights: Loaded) -> None:
            held.append(checksums(weight for _, weight in weights))
            load(manifest.with_aliases(weights))
            # A layer is loaded on the stream of its last bucket, and the next bucket is received on another one, into memory that
            # an earlier bucket of the layer may have been in.
            torch.accelerator.synchronize()

        with Abort(deadline.left.total_seconds(), communicator.destroy) as abort:
            packed_nccl_broadcast_consumer(
                iterator=((meta.name, (meta.shape, getattr(torch, meta.dtype))) for meta in manifest.tensors),
                group=communicator,
                src=0,
                post_unpack_func=take,
                buffer_size_bytes=bucket_bytes,
                num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
                device=self.device,
            )
            torch.accelerator.synchronize()
            sent = torch.empty(len(names), 2, dtype=torch.int64, device=self.device)
            communicator.broadcast(sent, src=0)
            torch.accelerator.synchronize()
            if abort.passed:
                raise TimeoutError(f"no complete update within {deadline.seconds:g} s")
        check(names, held, sent)
