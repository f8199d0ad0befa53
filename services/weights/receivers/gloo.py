"""Weights into a vLLM worker: runs inside the worker process, which loads it as its extension class.

Guarantees of all transports: joining a group runs concurrently with generation and never blocks it; every wait has a limit; after
a failure the worker can join another group and take a full update.
With `sync.verify` each worker compares checksums of what arrived, before vLLM fuses and repacks it, with the sender's; `changed`
names the first weight that differs. That is a result and not an error: with several workers an error would end the engine.
`gloo`, `filesystem` and `store` receive all weights into host memory, in a thread next to generation, and apply them only then
(staged, see double_buffer.py): a transfer that breaks leaves the old weights whole. vLLM's `nccl` writes as it receives
(streamed): a transfer that breaks leaves a mixture, which must not be sampled until a full update has arrived
(services/weights/receivers/nccl.py). The same applies to weights that arrived changed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._C._distributed_c10d import ProcessGroupGloo
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from services.weights.checksums import WeightChanged
from services.weights.collective import Deadline, WeightManifest, join_store, let_go, make_group, read_manifest
from services.weights.receivers import OWNER
from services.weights.receivers.double_buffer import DoubleBuffer, double_buffer
from services.weights.receivers.loaded import LoadedWeights, compare
from services.weights.shared_folder import Inbox
from services.weights.versions.broadcast import receive
from services.weights.versions.mirror import WeightMirror

logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: "RotaryEmbedding" not in record.getMessage()  # it has no weights, which vLLM reports as a failure to load them
)


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """The rendezvous of an epoch's group."""

    host: str
    port: int
    first_rank: int  # rank of worker 0; the sender is rank 0
    world_size: int
    bucket_bytes: int
    timeout_s: float


@dataclass
class ReceiveInfo(WeightTransferUpdateInfo):
    """Time limit of one transfer; its contents are in the group's manifest."""

    timeout_s: float
    verify_loaded: bool = False


class JoiningEngine(WeightTransferEngine[JoinInfo, ReceiveInfo]):
    """Common to all transports: joins in a thread, and leaves no half-open reload behind."""

    init_info_cls = JoinInfo
    update_info_cls = ReceiveInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.whole = True
        """Whether the model holds one version's weights. False while they are a mixture: during an update and after a failed
        one.
        """
        self.mirror = WeightMirror()
        """What arrived last, in host memory, to which deltas are applied. It outlives the group."""
        self.changed = ""
        """Name of the first weight of the last update that differs from what was sent; empty if none."""
        self.refused = ""
        """Why the last update was not applied, although it arrived whole; empty if it was."""
        self.verdict = LoadedWeights("", 0, 0)
        """Result of the comparison of the last update with the model, if one was requested."""
        self._joining: Future[Any] | None = None
        threading.Thread(target=_die_with_owner, args=(int(os.environ[OWNER]),), name="owner-watch", daemon=True).start()

    def connect(self, info: JoinInfo, rank: int) -> Any:
        """Connect to the group and return the connection; runs in a thread next to generation."""
        raise NotImplementedError

    def disconnect(self, connection: Any) -> None:
        """Release a connection. By default it is only dropped."""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Start to join; `join_state` reports when it is done."""
        self.shutdown()
        joining: Future[Any] = Future()
        parallel = self.parallel_config
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank

        def join() -> None:
            try:
                joining.set_result(self.connect(init_info, rank))
            except Exception as error:  # passed on to the caller of `connection`
                joining.set_exception(error)

        threading.Thread(target=join, name="weight-group-join", daemon=True).start()
        self._joining = joining

    def join_state(self) -> str:
        """Return `none`, `joining`, `joined`, or the reason why joining failed."""
        if self._joining is None:
            return "none"
        if not self._joining.done():
            return "joining"
        error = self._joining.exception()
        return "joined" if error is None else f"{type(error).__name__}: {error}"

    @property
    def connection(self) -> Any:
        """Return what `connect` returned. Raises `RuntimeError` without a connection."""
        if self._joining is None or self.join_state() != "joined":
            raise RuntimeError(f"no weight group: {self.join_state()}")
        return self._joining.result()

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

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load checkpoint-format weights into the model; only inside `reloading`."""
        loader: Any = self.model  # every vLLM model has load_weights, but torch.nn.Module does not declare it
        loader.load_weights(weights)

    def verify(self, weights: Iterable[tuple[str, torch.Tensor]], update_info: ReceiveInfo) -> None:
        """Compare the model with what was loaded into it, if requested. A model that differs is not `whole`."""
        quantized = getattr(self.model_config, "quantization", None) is not None  # its loaders may do more than copy
        self.verdict = compare(self.model, weights) if update_info.verify_loaded and not quantized else LoadedWeights("", 0, 0)
        self.whole = self.whole and not self.verdict.differs

    def start_weight_update(self) -> None:
        """Do nothing: the reload belongs to `receive_weights`."""

    def finish_weight_update(self) -> None:
        """Do nothing: the reload belongs to `receive_weights`."""

    def shutdown(self) -> None:
        """Leave the group. A group that is still being joined is left once it is connected."""
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.add_done_callback(lambda done: None if done.exception() else self.disconnect(done.result()))


class StagingEngine(JoiningEngine):
    """Receives into host memory while generation continues; on a CPU it loads meanwhile, too."""

    fetched_bytes: int | None = None
    """What the last transfer read from a store of versions; None without one."""
    _staging: Future[list[tuple[str, torch.Tensor]]] | None = None

    buffer: DoubleBuffer | None = None
    """Loads what was received before the pause; None if it is loaded in the pause."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffer = double_buffer(self.model, self.model_config)

    def take(self, connection: Any, deadline: Deadline, version: int) -> list[tuple[str, torch.Tensor]]:
        """Receive all weights of `version`; runs in a thread next to generation.

        Raises `RuntimeError`, `TimeoutError` or `WeightChanged`.
        """
        raise NotImplementedError

    def stage(self, timeout_s: float, version: int) -> None:
        """Start to receive; `stage_state` reports when it is done. Raises `RuntimeError` without a group."""
        self.changed = ""
        connection, joined = self.connection, self._joining
        staging: Future[list[tuple[str, torch.Tensor]]] = Future()

        def receive_all() -> None:
            try:
                staged = self.take(connection, Deadline(timeout_s), version)
                if self.buffer is not None:
                    self.buffer.fill(staged)
                staging.set_result(staged)
            except Exception as error:  # passed on to the caller that takes the weights
                current = self._joining is joined  # otherwise the caller has moved on to another group
                if isinstance(error, WeightChanged):
                    self.changed = error.tensor if current else self.changed
                else:  # the group cannot be used again
                    let_go(error)
                    if current:
                        self.shutdown()
                staging.set_exception(error)

        threading.Thread(target=receive_all, name="weight-staging", daemon=True).start()
        self._staging = staging

    def stage_state(self) -> str:
        """Return `staging`, `staged`, or the reason why receiving failed."""
        if self._staging is None:
            return "nothing staged"
        if not self._staging.done():
            return "staging"
        error = self._staging.exception()
        return "staged" if error is None else f"{type(error).__name__}: {error}"

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        """Replace the model's layers by those loaded meanwhile, or reload the model from the staged weights."""
        staging, self._staging = self._staging, None
        if staging is None:
            raise RuntimeError("no weights are staged")
        staged = staging.result(update_info.timeout_s)
        if self.buffer is not None and self.buffer.exchange(staged):
            self.whole = True
        else:
            with self.reloading():
                self.load(staged)
        self.verify(staged, update_info)


class GlooWeightTransferEngine(StagingEngine):
    """Receives weights over a gloo group."""

    def connect(self, info: JoinInfo, rank: int) -> tuple[ProcessGroupGloo, WeightManifest, dict[int, torch.Tensor]]:
        """Join the gloo group and read its manifest. Also returns memory to receive into, reused for the life of the group."""
        store = join_store(info.host, info.port, info.timeout_s)
        group = make_group(store, rank, info.world_size, info.host, info.port, info.timeout_s)
        return group, read_manifest(store), {}

    def take(
        self, connection: tuple[ProcessGroupGloo, WeightManifest, dict[int, torch.Tensor]], deadline: Deadline, version: int
    ) -> list[tuple[str, torch.Tensor]]:
        """Receive every bucket."""
        group, manifest, buffers = connection
        return receive(group, manifest, deadline, buffers, self.mirror)


class FilesystemWeightTransferEngine(StagingEngine):
    """Receives weights through files on a volume shared with the trainer; `host` is the group's folder."""

    def connect(self, info: JoinInfo, rank: int) -> Inbox:
        """Open the group's folder."""
        return Inbox(Path(info.host))

    def take(self, connection: Inbox, deadline: Deadline, version: int) -> list[tuple[str, torch.Tensor]]:
        """Read every file."""
        return connection.take(deadline, self.mirror)


class WorkerExtension:
    """Methods that vLLM mixes into its worker class, for `collective_rpc`."""

    weight_transfer_engine: JoiningEngine

    def stage_weights(self, timeout_s: float, version: int) -> str:
        """Start to receive. Returns an empty string, or why it could not start."""
        assert isinstance(self.weight_transfer_engine, StagingEngine)
        try:
            self.weight_transfer_engine.stage(timeout_s, version)
        except RuntimeError as error:
            return str(error)
        return ""

    def weight_stage_state(self) -> str:
        """Return `StagingEngine.stage_state` of this worker."""
        assert isinstance(self.weight_transfer_engine, StagingEngine)
        return self.weight_transfer_engine.stage_state()

    def weights_fetched(self) -> int | None:
        """Return `StagingEngine.fetched_bytes` of this worker."""
        assert isinstance(self.weight_transfer_engine, StagingEngine)
        return self.weight_transfer_engine.fetched_bytes

    def weight_group_state(self) -> str:
        """Return `JoiningEngine.join_state` of this worker."""
        return self.weight_transfer_engine.join_state()

    def weights_whole(self) -> bool:
        """Return `JoiningEngine.whole` of this worker."""
        return self.weight_transfer_engine.whole

    def weights_loaded(self) -> tuple[str, int, int]:
        """Return `JoiningEngine.verdict` of this worker: the weight that differs, the number compared, and their total."""
        verdict = self.weight_transfer_engine.verdict
        return verdict.differs, verdict.compared, verdict.total

    def weights_changed(self) -> str:
        """Return `JoiningEngine.changed` of this worker."""
        return self.weight_transfer_engine.changed

    def weights_refused(self) -> str:
        """Return `JoiningEngine.refused` of this worker."""
        return self.weight_transfer_engine.refused


def _die_with_owner(owner: int) -> None:
    """End this process when the generator is gone; otherwise vLLM's engine core would live on, and keep its memory, forever."""
    while any(parent.pid == owner for parent in psutil.Process().parents()):
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


WeightTransferEngineFactory.register_engine("grpo_gloo", GlooWeightTransferEngine)
WeightTransferEngineFactory.register_engine("grpo_filesystem", FilesystemWeightTransferEngine)
WeightTransferEngineFactory.register_engine("grpo_store", "services.weights.receivers.store", "StoreWeightTransferEngine")
WeightTransferEngineFactory.register_engine("grpo_nccl", "services.weights.receivers.nccl", "NcclWeightTransferEngine")
