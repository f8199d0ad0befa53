"""A replacement of the NCCL library for vLLM, over gloo, with tensors in host memory.

Everything above the library is vLLM's and ours: communicators, packed producer and consumer, engines, sender. CUDA is replaced,
too, where they need it: a device to name, streams, and waiting for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, FileStore, ProcessGroupGloo
from vllm.distributed.device_communicators import pynccl, pynccl_wrapper
from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, ncclDataTypeEnum, ncclUniqueId
from vllm.distributed.weight_transfer import packed_tensor

LIMIT_S = 15.0  # NCCL waits forever; an abort does not release gloo, so a test of an abort takes this long
POLL_S = 0.001
CPU = torch.device("cpu")
SIZES = {ncclDataTypeEnum.ncclUint8: 1, ncclDataTypeEnum.ncclInt64: 8, ncclDataTypeEnum.ncclFloat32: 4}


class Communicator:
    """What `ncclComm_t` points to."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int) -> None:
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=LIMIT_S)
        meeting = Path(tempfile.gettempdir(), f"nccl-{unique_id.hex()[:32]}")
        self.group = ProcessGroupGloo(FileStore(str(meeting), world_size), rank, world_size, options)
        self.aborted = False

    def finish(self, work: Any) -> None:
        """Finish like a kernel on a stream: an abort ends it and releases whoever waits for the stream."""
        while not work.is_completed() and not self.aborted:
            time.sleep(POLL_S)


class Library:
    """The functions of `pynccl_wrapper.NCCLLibrary` that a communicator for weights calls."""

    def __init__(self, so_file: str | None = None) -> None: ...

    def ncclGetRawVersion(self) -> int:
        return 22907

    def ncclGetUniqueId(self) -> ncclUniqueId:
        return self.unique_id_from_bytes(secrets.token_bytes(NCCL_UNIQUE_ID_BYTES))

    def unique_id_from_bytes(self, data: bytes) -> ncclUniqueId:
        unique_id = ncclUniqueId()
        ctypes.memmove(ctypes.addressof(unique_id.internal), data, NCCL_UNIQUE_ID_BYTES)
        return unique_id

    def ncclCommInitRank(self, world_size: int, unique_id: ncclUniqueId, rank: int) -> Communicator:
        return Communicator(bytes(unique_id.internal), rank, world_size)

    def ncclBroadcast(
        self, sendbuff: Any, recvbuff: Any, count: int, datatype: int, root: int, comm: Communicator, stream: Any
    ) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        comm.finish(comm.group.broadcast([_tensor(recvbuff, count, datatype)], options))  # pyright: ignore[reportAttributeAccessIssue]

    def ncclAllReduce(
        self, sendbuff: Any, recvbuff: Any, count: int, datatype: int, op: int, comm: Communicator, stream: Any
    ) -> None:
        comm.finish(comm.group.allreduce([_tensor(recvbuff, count, datatype)], AllreduceOptions()))  # pyright: ignore[reportAttributeAccessIssue]

    def ncclCommAbort(self, comm: Communicator) -> None:
        comm.aborted = True
        comm.group.abort()  # no pending work that the shutdown would wait for


def _tensor(pointer: Any, count: int, datatype: int) -> torch.Tensor:
    memory = (ctypes.c_char * (count * SIZES[datatype])).from_address(pointer.value)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Stream:
    """A CUDA stream whose work is always complete."""

    cuda_stream = 0

    def __init__(self, device: Any = None) -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def wired() -> Iterator[None]:
    """Replace NCCL with gloo inside this block."""
    packed_tensor._get_streams.cache_clear()
    replaced: list[tuple[Any, str, Any]] = [
        (pynccl_wrapper, "NCCLLibrary", Library),
        (pynccl, "NCCLLibrary", Library),
        (pynccl, "current_stream", Stream),
        (torch.accelerator, "current_device_index", lambda: CPU),
        (torch.accelerator, "set_device_index", lambda device: None),
        (torch.accelerator, "device_index", contextlib.nullcontext),
        (torch.accelerator, "synchronize", lambda: None),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "current_stream", Stream),
        (torch.cuda, "stream", contextlib.nullcontext),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, by in replaced:
            stack.enter_context(mock.patch.object(owner, name, by))
        yield
    packed_tensor._get_streams.cache_clear()
