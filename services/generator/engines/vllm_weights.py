"""Weights of vLLM's workers, as a `WeightReceiver` receives them (services/weights/receiver.py).

Guarantees: a version is applied whole in every worker, or `whole` says that it was not; an update that fails leaves the previous
version. Workers connect and receive in their own threads while the engine samples, and are polled until they are done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from services.config import RunConfig
from services.protocol.messages import Round
from services.weights.buckets import BUCKET_BYTES
from services.weights.receiver import EngineDead, TransferFailed, WeightsChanged

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_GRACE_S = 15.0
"""A worker has its own limits; an answer this much later will never come. Long enough for one iteration."""
_POLL_S = 0.02


class WorkerWeights:
    """What the workers of one `AsyncLLM` hold. `stages`: whether they receive before they apply."""

    def __init__(self, llm: AsyncLLM, config: RunConfig, stages: bool) -> None:
        self.version = -1
        self.whole = True
        self.fetched_bytes: int | None = None
        self.loads = 0  # weights applied; a version that is retrained has other weights
        self._llm, self._config, self._stages = llm, config, stages
        self._world = config.generator.tensor_parallel
        self._staged = -1  # the version staged in the workers, ready to be applied

    async def join(self, round: Round, first_rank: int) -> None:
        """Join while generation continues: the workers connect in threads, and their state is polled."""
        limit_s = self._config.sync.answer_s
        host = f"{self._config.weights_place}/{round.host}" if round.backend == "store" else round.host
        info = {
            "host": host,
            "port": round.port,
            "first_rank": first_rank,
            "world_size": round.world_size,
            "bucket_bytes": BUCKET_BYTES,
            "timeout_s": limit_s,
        }
        async with bounded(limit_s + _GRACE_S, "join"):
            deadline = time.monotonic() + limit_s
            await self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})
            while True:
                states = {state["join"] for state in await self._states()}
                if states == {"done"}:
                    return
                if failures := sorted(states - {"done", "running"}):
                    where = f"epoch {round.epoch} at {host}{f':{round.port}' * bool(round.port)}"
                    raise TransferFailed(f"weight group of {where}: {'; '.join(failures)}")
                if time.monotonic() > deadline:
                    raise TransferFailed(f"weight group of epoch {round.epoch}: not all ranks joined within {limit_s} s")
                await asyncio.sleep(_POLL_S)

    async def stage(self, version: int, limit_s: float | None = None) -> None:
        """Receive while generation continues: the workers receive in threads, and their state is polled."""
        self._staged = -1
        limit_s = limit_s or self._config.sync.deadline_s
        async with bounded(limit_s + _GRACE_S, "weight transfer"):
            failures = {said for said in await self._llm.collective_rpc("stage_weights", args=(version, limit_s)) if said}
            while not failures:
                states = await self._states()
                staging = {state["stage"] for state in states}
                if staging == {"done"}:
                    fetched = [state["fetched_bytes"] for state in states]
                    self.fetched_bytes = None if None in fetched else sum(fetched)
                    self._staged = version
                    return
                if "running" not in staging:
                    failures = staging - {"done"}
                    break
                await asyncio.sleep(_POLL_S)
            _raise_if_changed(await self._states())
        raise TransferFailed(f"weight transfer of version {version} failed: {'; '.join(sorted(failures))}")

    async def receive(self, version: int) -> None:
        """Receive the weights, or use the staged ones; apply them and set the version."""
        if self._stages and self._staged != version:
            await self.stage(version)
        self._staged = -1
        await self._apply(version)

    async def _apply(self, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        limit_s = self._config.sync.deadline_s
        async with bounded(limit_s + _GRACE_S, "weight transfer"):
            try:
                await self._llm.start_weight_update()
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"timeout_s": limit_s}))
                states = await self._states()
                changed = any(state["changed"] for state in states)
                await self._llm.finish_weight_update(None if changed else str(version))
            except Exception as error:  # vLLM has no exception type for failures in a worker
                if self._llm.errored or self._world > 1:  # with several workers, late replies would answer the next call
                    raise EngineDead(f"weight transfer of version {version} failed: {error}") from error
                self.whole = all(state["whole"] for state in await self._states())
                raise TransferFailed(f"weight transfer of version {version} failed: {error}") from error
            if changed:  # one worker may have applied weights that another has not
                self.whole = self._world == 1 and all(state["whole"] for state in states)
                _raise_if_changed(states)
        self.version, self.whole = version, True
        self.loads += 1

    async def _states(self) -> list[dict[str, Any]]:
        """Return the state of each worker's weights (services/weights/vllm_worker.py)."""
        return await self._llm.collective_rpc("weight_state")


def _raise_if_changed(states: list[dict[str, Any]]) -> None:
    for state in states:
        if state["changed"]:
            raise WeightsChanged(state["changed"])


@asynccontextmanager
async def bounded(seconds: float, what: str) -> AsyncIterator[None]:
    """Bound calls to the engine core. If one does not answer in time, the engine is stuck."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise EngineDead(f"vLLM did not answer within {seconds} s: {what}") from None
    except EngineDeadError as error:
        raise EngineDead(f"vLLM's engine core died: {what}") from error
