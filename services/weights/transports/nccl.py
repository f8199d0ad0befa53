"""How weights travel from the trainer's rank 0 to GPUs: over an NCCL group.

Guarantees: those of all transports; NCCL itself waits forever, so it connects in a thread, and a timer aborts broadcasts.
Receiver: services/weights/receivers/nccl.py.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from services.config import ConfigError, RunConfig
from services.weights.checksums import checksums
from services.weights.collective import BUCKET_BYTES, NCCL_ID, Abort, Deadline, Gathered, WeightManifest
from services.weights.sparse.consent import unpatchable
from services.weights.sparse.patch import Patch
from services.weights.transports.base import Meeting
from services.weights.versions.broadcast import EncodedDelta, Heading

VLLM_MODULES = (
    "vllm.distributed.device_communicators.pynccl", "vllm.distributed.weight_transfer.packed_tensor", "vllm.utils.nccl"
)  # fmt: skip
"""Modules of vLLM that the sender uses."""


class NcclTransport(Meeting):
    """Broadcasts between GPUs, packed by vLLM."""

    backend = "nccl"
    _world_size = 1

    def __init__(self, config: RunConfig, fleeting: bool) -> None:
        """Raises `ConfigError` where vLLM is not installed."""
        super().__init__(config, fleeting)
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                f'sync.backend = "{config.sync.backend}" sends weights from GPU to GPU, for which the trainer needs vLLM, too: '
                'install it with pip install vllm==0.32.0, or set sync.backend = "gloo"'
            )

    def open(self, manifest: WeightManifest) -> tuple[str, int]:
        """Listen on a free port. Imports vLLM first, which can take longer than members wait for the id of the NCCL group."""
        for name in VLLM_MODULES:
            importlib.import_module(name)
        warnings.filterwarnings("ignore", r"Tensor '.*' has size \d+ bytes, which exceeds buffer_size_bytes")  # it is sent alone
        return super().open(manifest)

    def connect(self, world_size: int) -> None:
        """Connect in a thread, because NCCL itself waits forever."""
        self._world_size = world_size
        self._group = _nccl_communicator(self._store, world_size, self.sync.join_deadline_s)

    def send(self, gathered: Gathered, manifest: WeightManifest, deadline: Deadline, heading: Heading | None = None) -> None:
        """Send with vLLM's producer, which packs the weights into its own buckets; a broadcast past the deadline is aborted."""
        from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_NUM_BUFFERS, packed_nccl_broadcast_producer

        group, sums = self.group, list[torch.Tensor]()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for bucket, tensors in gathered:
                if manifest.verified:
                    sums.append(checksums(tensors))
                # The producer's streams take turns, and a bucket may be packed on both. They do not wait for each other.
                torch.cuda.current_stream().synchronize()
                for meta, tensor in zip(bucket.tensors, tensors, strict=True):
                    if tensor.is_cuda:  # its memory is not reused before this stream has read it
                        tensor.record_stream(torch.cuda.current_stream())
                    yield meta.name, tensor.clone() if self.fleeting else tensor  # read after the next has been requested

        torch.cuda.synchronize()  # nor do they wait for the stream that trained
        with self._within(deadline):
            if heading is not None:
                group.broadcast(heading.encoded().to(group.device), src=0)
            packed_nccl_broadcast_producer(
                iterator=weights(),
                group=group,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=BUCKET_BYTES,
                num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
            )
            torch.cuda.synchronize()
            if manifest.verified:
                group.broadcast(torch.cat(sums), src=0)
                torch.cuda.synchronize()

    def send_delta(self, delta: EncodedDelta, deadline: Deadline) -> None:
        """Broadcast heading and payload, in chunks, through the GPU."""
        group = self.group
        with self._within(deadline) as check:
            for tensor in (delta.heading.encoded(), *delta.payload.split(BUCKET_BYTES)):
                group.broadcast(tensor.to(group.device), src=0)
                torch.cuda.synchronize()
                check()

    def send_patch(self, patch: Patch, parts: Iterator[torch.Tensor], heading: Heading, deadline: Deadline) -> None:
        """Broadcast heading, table and chunks. A rank's part is requested when the one before has been sent."""
        group = self.group
        with self._within(deadline) as check:
            for tensor in (heading.encoded(), patch.encoded(heading.fence, heading.version)):
                group.broadcast(tensor.to(group.device), src=0)
            part, end = torch.empty(0, dtype=torch.uint8), 0
            for _, nbytes in patch.chunks():
                if end == part.numel():
                    torch.cuda.synchronize()
                    check()
                    part, end = next(parts).to(group.device), 0
                group.broadcast(part[end : end + nbytes], src=0)
                end += nbytes
            torch.cuda.synchronize()

    def unpatchable(self) -> list[int]:
        """Ask the store which ranks have not said that they take patches."""
        return unpatchable(self._store, range(1, self._world_size))

    @contextlib.contextmanager
    def _within(self, deadline: Deadline) -> Iterator[Callable[[], None]]:
        """Abort the communicator at the deadline, and raise `TimeoutError` at the end.

        Yields a function that raises it earlier.
        """

        def check() -> None:
            if abort.passed:
                raise TimeoutError(f"the broadcast took longer than sync.transfer_deadline_s = {deadline.seconds:g}")

        with Abort(deadline.left.total_seconds(), self.group.destroy) as abort:
            yield check
            check()

    def close(self) -> None:
        """Abort the communicator."""
        if self._group is not None:
            self._group.destroy()
        super().close()


def _nccl_communicator(store: Any, world_size: int, timeout_s: float) -> Any:
    """Create rank 0 of an NCCL group whose members read the unique id from `store`; in a thread, because NCCL waits forever."""
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
