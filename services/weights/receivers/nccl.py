"""Weights into a vLLM worker on a GPU: vLLM's packed NCCL broadcast, joined in a thread and with a time limit.

Guarantees: a broadcast that exceeds its limit is aborted, so the worker always answers; after that, or after any other failure or
a checksum that differs, `whole` is False until a full update has arrived. What changed is compared with what it replaces before
anything is written, so a transfer of changes that breaks leaves the model unchanged (patching.py; in host memory,
versions/mirror.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_NUM_BUFFERS, packed_nccl_broadcast_consumer
from vllm.utils.nccl import unpinned_nccl_env

from services.weights.checksums import WeightChanged, check, checksums
from services.weights.collective import (
    BUCKET_BYTES,
    NCCL_ID,
    Abort,
    WeightManifest,
    arrive,
    join_store,
    read_manifest,
)
from services.weights.receivers.gloo import JoinInfo, JoiningEngine, ReceiveInfo
from services.weights.receivers.loaded import LoadedWeights
from services.weights.receivers.patching import Patcher
from services.weights.sparse.consent import declare_patchable
from services.weights.sparse.patch import decode
from services.weights.versions.broadcast import Heading, adopt, apply
from services.weights.versions.mirror import NOTHING
from services.weights.versions.positions import InvalidVersion


class NcclWeightTransferEngine(JoiningEngine):
    """Receives weights over NCCL and streams them into the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.patcher = Patcher(self.model, getattr(self.model_config, "quantization", None) is not None)

    def connect(self, info: JoinInfo, rank: int) -> tuple[PyNcclCommunicator, WeightManifest, int, Callable[[], None]]:
        """Join the NCCL group and read its manifest.

        Also returns a function that tells the sender whether this rank takes patches.
        """
        torch.accelerator.set_device_index(self.device)  # the current device is a property of the thread
        store = join_store(info.host, info.port, info.timeout_s)
        declare = partial(self._declare, store, rank)
        declare()
        arrive(store, rank)
        with unpinned_nccl_env():
            communicator = PyNcclCommunicator.from_unique_id_bytes(store.get(NCCL_ID), rank, info.world_size, self.device)
        return communicator, read_manifest(store), info.bucket_bytes, declare

    def disconnect(self, connection: Any) -> None:
        """Abort the communicator."""
        connection[0].destroy()

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        """Receive packed buckets and load each into the model as it arrives; or a delta, applied in host memory, then loaded."""
        communicator, manifest, _, declare = self.connection
        self.changed = self.refused = ""
        try:
            with Abort(update_info.timeout_s, communicator.destroy) as abort:
                heading = self._heading(update_info, abort) if manifest.deltas else None
                if heading is not None and heading.is_delta and manifest.sparse:
                    self._patch(heading, update_info, abort)
                    return
                if heading is not None and heading.is_delta:
                    weights = apply(self.mirror, heading, self._payload(heading.nbytes, update_info, abort))
                    with self.reloading():
                        self.load(weights)
                    self.verify(weights, update_info)
                    return
                self.mirror.forget()
                self.patcher.forget()
                kept = self._stream(update_info, abort)
            self.verify(manifest.with_aliases(kept), update_info)
            if heading is not None and manifest.sparse:
                if self.whole:
                    self.patcher.adopt(heading, manifest)
                declare()
            elif heading is not None:
                adopt(self.mirror, heading, manifest, kept)
        except WeightChanged as error:
            self.changed = error.tensor

    def _stream(self, update_info: ReceiveInfo, abort: Abort) -> list[tuple[str, torch.Tensor]]:
        """Receive all weights into the model. Returns copies in host memory if they are needed.

        Raises `TimeoutError` and `WeightChanged`.
        """
        communicator, manifest, bucket_bytes, _ = self.connection
        names = [meta.name for meta in manifest.tensors]
        held, kept = list[torch.Tensor](), list[tuple[str, torch.Tensor]]()

        def take(weights: list[tuple[str, torch.Tensor]]) -> None:
            if manifest.verified:
                held.append(checksums(weight for _, weight in weights))
            if (manifest.deltas and not manifest.sparse) or update_info.verify_loaded:
                kept.extend((name, weight.to("cpu", copy=True)) for name, weight in weights)
            self.load(manifest.with_aliases(weights))
            # A layer is loaded on the stream of its last bucket, and the next bucket is received on another one, into memory that
            # an earlier bucket of the layer may have been in.
            torch.accelerator.synchronize()

        with self.reloading():
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
                self._broadcast(communicator, sent)
            _raise_if(abort, update_info)
            if manifest.verified:
                check(names, held, sent)
        return kept

    def _patch(self, heading: Heading, update_info: ReceiveInfo, abort: Abort) -> None:
        """Receive what changed, compare what it replaces, and write it into the model.

        Raises like `receive_weights`. The model is unchanged if it raises, or if `refused` gives a reason. If the model does
        not have what was written, `verdict` says so.
        """
        communicator, manifest, _, _ = self.connection
        table = self._broadcast(communicator, torch.empty(heading.manifest_nbytes, dtype=torch.uint8, device=self.device))
        _raise_if(abort, update_info)
        patch = decode(table.cpu(), heading, manifest)

        largest = max((nbytes for _, nbytes in patch.chunks()), default=0)
        buffer = torch.empty(largest, dtype=torch.uint8, device=self.device)  # once, since receiving must not fail

        def chunks() -> Iterator[tuple[range, torch.Tensor]]:
            for rows, nbytes in patch.chunks():
                data = self._broadcast(communicator, buffer[:nbytes])
                _raise_if(abort, update_info)
                yield rows, data

        try:
            found = self.patcher.find(patch, heading.fence, manifest, chunks())
        except WeightChanged:
            self.whole = self.whole and self.patcher.held != NOTHING  # the model itself may be what differs
            raise
        except InvalidVersion as error:
            self.refused = str(error)
            return
        except torch.OutOfMemoryError as error:
            self.patcher.distrust("it has no memory for a patch; lower gpu_memory_utilization in generator.engine_options")
            self.refused = str(error)
            return
        self.whole = False
        self.whole = self.patcher.write(found, heading)
        self.verdict = LoadedWeights("" if self.whole else "a patch", 0, 0)

    def _declare(self, store: Any, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # the sender is gone: its next group asks again
            declare_patchable(store, rank, self.patcher.able)

    def _heading(self, update_info: ReceiveInfo, abort: Abort) -> Heading:
        communicator, manifest, _, _ = self.connection
        encoded = self._broadcast(communicator, torch.empty(4, dtype=torch.int64, device=self.device))
        _raise_if(abort, update_info)  # before anything is forgotten: what an aborted broadcast leaves is no heading
        return Heading.decoded(encoded.cpu(), manifest)

    def _payload(self, nbytes: int, update_info: ReceiveInfo, abort: Abort) -> torch.Tensor:
        """Receive a delta into host memory, a chunk at a time, since it may be nearly as long as the weights."""
        payload = torch.empty(nbytes, dtype=torch.uint8)
        for chunk in payload.split(BUCKET_BYTES):
            chunk.copy_(self._broadcast(self.connection[0], torch.empty(len(chunk), dtype=torch.uint8, device=self.device)))
            _raise_if(abort, update_info)
        return payload

    def _broadcast(self, communicator: PyNcclCommunicator, tensor: torch.Tensor) -> torch.Tensor:
        communicator.broadcast(tensor, src=0)
        torch.accelerator.synchronize()
        return tensor


def _raise_if(abort: Abort, update_info: ReceiveInfo) -> None:
    if abort.passed:
        raise TimeoutError(f"no complete update within {update_info.timeout_s} s")
