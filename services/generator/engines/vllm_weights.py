"""Weights of vLLM's workers, as a `WeightReceiver` receives them (services/weights/receiver.py).

Guarantees: a version is applied whole in every worker, or `whole` says that it was not; an update that fails leaves the previous
version. Workers connect and receive in their own threads while the engine samples, and are polled until they are done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from services.config import RunConfig
from services.protocol.messages import Round
from services.weights.collective import BUCKET_BYTES
from services.weights.receiver import EngineDead, TransferFailed, WeightsChanged, WeightsMisloaded

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger()

_GRACE_S = 15.0
"""A worker has its own limits; an answer this much later will never come. Long enough for one iteration."""
_JOIN_POLL_S = 0.02


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
        """Join while generation continues: the worker connects in a thread, and its state is polled."""
        limit_s = self._config.sync.join_deadline_s
        places = {"filesystem": self._config.weights_folder.absolute(), "store": self._config.weights_place}
        folder = f"{places[round.backend]}/{round.host}" if round.backend in places else None
        info = {
            "host": folder or round.host,
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
                states = set(await self._llm.collective_rpc("weight_group_state"))
                if states == {"joined"}:
                    return
                if failures := sorted(states - {"joined", "joining"}):
                    where = f"epoch {round.epoch} at {folder or f'{round.host}:{round.port}'}"
                    raise TransferFailed(f"weight group of {where}: {'; '.join(failures)}")
                if time.monotonic() > deadline:
                    raise TransferFailed(f"weight group of epoch {round.epoch}: not all ranks joined within {limit_s} s")
                await asyncio.sleep(_JOIN_POLL_S)

    async def stage(self, version: int, limit_s: float | None = None) -> None:
        """Receive while generation continues: the worker receives in a thread, and its state is polled."""
        self._staged = -1
        limit_s = limit_s or self._config.sync.transfer_deadline_s
        async with bounded(limit_s + _GRACE_S, "weight transfer"):
            failures = {said for said in await self._llm.collective_rpc("stage_weights", args=(limit_s, version)) if said}
            while not failures:
                states = set(await self._llm.collective_rpc("weight_stage_state"))
                if states == {"staged"}:
                    fetched = await self._llm.collective_rpc("weights_fetched")
                    self.fetched_bytes = None if None in fetched else sum(fetched)
                    self._staged = version
                    return
                if "staging" not in states:
                    failures = states - {"staged"}
                    break
                await asyncio.sleep(_JOIN_POLL_S)
            for changed in await self._llm.collective_rpc("weights_changed"):
                if changed:
                    raise WeightsChanged(changed)
        raise TransferFailed(f"weight transfer of version {version} failed: {'; '.join(sorted(failures))}")

    async def receive(self, version: int) -> None:
        """Receive the weights, or use the staged ones; apply them and set the version."""
        if self._stages and self._staged != version:
            await self.stage(version)
        self._staged = -1
        await self._apply(version)

    async def _apply(self, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        limit_s, verify = self._config.sync.transfer_deadline_s, self._config.sync.verify_loaded
        async with bounded(limit_s + _GRACE_S, "weight transfer"):
            try:
                await self._llm.start_weight_update()
                await self._llm.update_weights(
                    WeightTransferUpdateRequest(update_info={"timeout_s": limit_s, "verify_loaded": verify})
                )
                changed = [name for name in await self._llm.collective_rpc("weights_changed") if name]
                loaded = await self._llm.collective_rpc("weights_loaded")
                wrong = [name for name, _, _ in loaded if name]
                refused = [why for why in await self._llm.collective_rpc("weights_refused") if why]
                await self._llm.finish_weight_update(None if changed or wrong or refused else str(version))
            except Exception as error:  # vLLM has no exception type for failures in a worker
                if self._llm.errored or self._world > 1:  # with several workers, late replies would answer the next call
                    raise EngineDead(f"weight transfer of version {version} failed: {error}") from error
                self.whole = all(await self._llm.collective_rpc("weights_whole"))
                raise TransferFailed(f"weight transfer of version {version} failed: {error}") from error
            if changed or refused:  # one worker may have applied weights that another has not
                self.whole = self._world == 1 and all(await self._llm.collective_rpc("weights_whole"))
                if changed:
                    raise WeightsChanged(changed[0])
                raise TransferFailed(f"version {version} was not applied: {refused[0]}")
            if wrong:
                self.whole = False
                raise WeightsMisloaded(wrong[0])
        if verify and not self.loads:
            log.info("compared loaded weights", compared=sum(n for _, n, _ in loaded), of=sum(n for _, _, n in loaded))
        self.version, self.whole = version, True
        self.loads += 1


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
