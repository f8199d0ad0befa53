"""Weights into a vLLM worker on a GPU: vLLM's packed NCCL broadcast, joined in a thread and with a time limit.

Guarantees: a broadcast that exceeds its limit is aborted, so the worker always answers; after that, or after any other failure or
a checksum that differs, `whole` is False until a full update has arrived.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_NUM_BUFFERS, packed_nccl_broadcast_consumer
from vllm.utils.nccl import unpinned_nccl_env

from services.weights.checksums import WeightChanged, check, checksums
from services.weights.collective import NCCL_ID, Abort, WeightManifest, arrive, join_store, read_manifest
from services.weights.receivers.gloo import JoinInfo, JoiningEngine, ReceiveInfo


class NcclWeightTransferEngine(JoiningEngine):
    """Receives weights over NCCL and streams them into the model."""

    def connect(self, info: JoinInfo, rank: int) -> tuple[PyNcclCommunicator, WeightManifest, int]:
        """Join the NCCL group and read its manifest."""
        torch.accelerator.set_device_index(self.device)  # the current device is a property of the thread
        store = join_store(info.host, info.port, info.timeout_s)
        arrive(store, rank)
        with unpinned_nccl_env():
            communicator = PyNcclCommunicator.from_unique_id_bytes(store.get(NCCL_ID), rank, info.world_size, self.device)
        return communicator, read_manifest(store), info.bucket_bytes

    def disconnect(self, connection: Any) -> None:
        """Abort the communicator."""
        connection[0].destroy()

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        """Receive packed buckets and load each into the model as it arrives."""
        communicator, manifest, bucket_bytes = self.connection
        names = [meta.name for meta in manifest.tensors]
        held: list[torch.Tensor] = []

        def take(weights: list[tuple[str, torch.Tensor]]) -> None:
            if manifest.verified:
                held.append(checksums(weight for _, weight in weights))
            self.load(weights)

        self.changed = ""
        try:
            with Abort(update_info.timeout_s, communicator.destroy) as abort, self.reloading():
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
                if manifest.verified:
                    communicator.broadcast(sent, src=0)
                    torch.accelerator.synchronize()
                if abort.passed:
                    raise TimeoutError(f"no complete update within {update_info.timeout_s} s")
                if manifest.verified:
                    check(names, held, sent)
        except WeightChanged as error:
            self.changed = error.tensor
