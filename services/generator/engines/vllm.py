"""vLLM's `AsyncLLM` as an `Engine`.

Guarantees: those of services/generator/engines/base.py. The model runs in its own processes, which end when this process does,
for whatever reason. Importing this module does not import vLLM.
Pinned to vLLM 0.32.0: `snapshot` and `gauges` read its output processor, and `pause` asks its engine core, which are not public
interfaces.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from services.config import ConfigError, RunConfig
from services.confined.scratch import Scratch
from services.generator.engines.base import QUEUED_S, Gauges
from services.generator.engines.vllm_arguments import (
    check_cpu_arguments,
    engine_arguments,
    has_gpu,
    set_environment,
    stop_tokens,
)
from services.generator.engines.vllm_requests import continued_seed, generated, last, sampling_params
from services.generator.engines.vllm_weights import WorkerWeights, bounded
from services.groups.generated import Generated, GenerationFailed, SamplingParameters
from services.protocol.messages import Round
from services.weights.receiver import EngineDead, TransferFailed
from services.weights.transport import backend_of

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger()

_CLOSE_S = 5.0
"""Seconds for vLLM to shut down before its processes are killed."""
_ABORT_POLL_S = 0.005


class VllmEngine:
    """One `AsyncLLM`, owned by the event loop that called `start`."""

    def __init__(self) -> None:
        self.world = 1
        self.vocabulary = 0
        self.stages = False
        self._started: AsyncLLM | None = None
        self._weights: WorkerWeights | None = None
        self._prefixes: dict[str, Generated | None] = {}  # of running completions, by request id
        self._prompts: dict[str, tuple[int, float]] = {}  # of running completions: hash of the prompt, start time
        self._resent: set[str] = set()  # running completions that were stopped to be sent to vLLM again
        self._tokens = 0  # of completions that ended
        self._seen: dict[str, int] = {}  # tokens of running completions when they were last counted, by request id
        self._strangers: set[int | None] = set()  # child processes of this one that do not belong to the engine
        self._sockets: Scratch | None = None  # folder of vLLM's sockets, which it leaves behind

    async def start(self, config: RunConfig) -> None:
        """Load the model, which takes 10-15 s on a CPU."""
        self._config = config
        self.world = config.generator.tensor_parallel
        self.stages = backend_of(config, has_gpu()) != "nccl"
        self._strangers = {child.pid for child in multiprocessing.active_children()}
        await asyncio.to_thread(self._load)
        self._weights = WorkerWeights(self._llm, config, self.stages)
        _cache_environment(True)
        await self._llm.update_weight_version("-1")
        await self._llm.get_supported_tasks()  # vLLM keeps the answer: later requests are registered without waiting

    def _load(self) -> None:
        gpu = has_gpu()
        self._sockets = Scratch()
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._sockets.path)
        set_environment(self._config, gpu)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(self._config, gpu)
        if not gpu:
            check_cpu_arguments(arguments)
        self._stop_tokens = stop_tokens(self._config.model.path)
        try:
            self._started = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except ValueError as error:
            raise ConfigError(f"vLLM rejects the configuration of the model or the generator: {error}") from error
        except RuntimeError as error:
            raise EngineDead(f"vLLM did not start: {error}") from error
        self.vocabulary = self._started.vllm_config.model_config.get_vocab_size()
        cache = self._started.vllm_config.cache_config
        self._kv_blocks, self._kv_block = cache.num_gpu_blocks or 0, cache.block_size

    @property
    def _llm(self) -> AsyncLLM:
        if self._started is None:
            raise EngineDead("the engine is not running")
        return self._started

    @property
    def _loaded(self) -> WorkerWeights:
        if self._weights is None:
            raise EngineDead("the engine is not running")
        return self._weights

    @property
    def version(self) -> int:
        """Policy version of the weights held; -1: none received yet."""
        return self._weights.version if self._weights else -1

    @property
    def whole(self) -> bool:
        """Return whether all weights are of one version."""
        return self._weights is None or self._weights.whole

    @property
    def fetched_bytes(self) -> int | None:
        """Return the bytes that the last `stage` read from a store of versions; None without one."""
        return self._weights.fetched_bytes if self._weights else None

    async def generate(
        self, request_id: str, prompt: list[int], seed: int, sampling: SamplingParameters, prefix: Generated | None = None
    ) -> Generated:
        """Complete `prompt`. A stop string that begins inside `prefix` is not detected."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        made = 0 if prefix is None else len(prefix.tokens)
        if prefix is not None and (prefix.finish != "aborted" or made >= sampling.max_tokens):
            return prefix if prefix.finish != "aborted" else replace(prefix, finish="length")
        tokens = prompt if prefix is None else prompt + prefix.tokens.tolist()
        parameters = sampling_params(sampling, continued_seed(seed, made), made, self._stop_tokens)
        if request_id in self._prefixes:
            raise ValueError(f"request {request_id!r} is already running")
        self._prefixes[request_id] = prefix
        self._prompts[request_id] = hash(tuple(tokens)), time.monotonic()
        try:
            output = await self._output(request_id, tokens, parameters)
            self._seen[request_id] = len(output.outputs[0].token_ids)
        except EngineDeadError as error:
            raise EngineDead(f"vLLM's engine core died while generating {request_id}; see its log for the reason") from error
        except (EngineGenerateError, VLLMClientError, ValueError) as error:
            raise GenerationFailed(f"{request_id}: {error.__cause__ or error}") from error
        finally:
            del self._prefixes[request_id], self._prompts[request_id]
            self._resent.discard(request_id)
            self._tokens += self._seen.pop(request_id, 0)  # of a cancelled one, vLLM has dropped the count
        return generated(request_id, output, prefix)

    async def _output(self, request_id: str, tokens: list[int], parameters: SamplingParams) -> RequestOutput:
        """Return vLLM's final output, of the last request if the completion was sent again."""
        from vllm.inputs.engine import tokens_input

        while True:
            salted = tokens_input(
                tokens, cache_salt=f"weights {self._loaded.loads}"
            )  # KV of older weights may still be in the cache
            output = await last(self._llm.generate(salted, parameters, request_id))
            if request_id not in self._resent:
                return output
            self._resent.remove(request_id)

    async def _send_waiting_again(self) -> None:
        """Send completions without a token to vLLM again, under the salt of the current weights.

        Otherwise they would take their prompts' KV of older weights from the prefix cache, and their spans would not say so.
        A token that is still on its way from the engine core is sampled again.
        """
        waiting = [
            request_id
            for request_id in self._prefixes
            if any(not state.detokenizer.num_output_tokens() for state in self._states(request_id))
        ]
        self._resent.update(waiting)
        await self._llm.abort(waiting)

    def snapshot(self, request_ids: Iterable[str] | None = None) -> dict[str, Generated]:
        """Return the tokens so far, read from vLLM's output processor without a message to the engine core."""
        from vllm.v1.engine import FinishReason

        found: dict[str, Generated] = {}
        for request_id in list(self._prefixes) if request_ids is None else request_ids:
            for state in self._states(request_id):
                output = state.make_request_output([], None, FinishReason.ABORT, None)
                found[request_id] = generated(request_id, output, self._prefixes[request_id])
        return found

    def _states(self, request_id: str) -> list[Any]:
        processor = self._llm.output_processor
        return [processor.request_states[key] for key in processor.external_req_ids.get(request_id, ())]

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Stop completions; return once their `generate` calls have. Waits for one that vLLM has not registered yet."""
        named = set(self._prefixes) if request_ids is None else set(request_ids)
        while named := {request_id for request_id in named if request_id in self._prefixes}:
            await self._llm.abort([request_id for request_id in named if self._states(request_id)])
            await asyncio.sleep(_ABORT_POLL_S)

    async def pause(self) -> None:
        """Stop after the current iteration; keep the requests with their KV cache."""
        async with bounded(self._config.sync.answer_s, "pause"):
            # Not `pause_generation`, which then sleeps for 20 ms: outputs may come later, since the core stamps them.
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Resume sampling."""
        if not self.whole:
            raise TransferFailed("an update was applied only in part: sampling cannot resume until a complete one arrives")
        async with bounded(self._config.sync.answer_s, "resume"):
            await self._llm.resume_generation()

    async def join(self, round: Round, first_rank: int) -> None:
        """Join while generation continues."""
        await self._loaded.join(round, first_rank)

    async def stage(self, version: int, limit_s: float | None = None) -> None:
        """Receive while generation continues."""
        await self._loaded.stage(version, limit_s)

    async def receive(self, version: int) -> None:
        """Receive the weights, or use the staged ones; apply them and set the version."""
        await self._loaded.receive(version)
        await self._send_waiting_again()

    def gauges(self) -> Gauges:
        """Count the load here: vLLM's own statistics describe its last iteration, not the present moment.

        `kv_usage` is what the running completions need, in blocks; at 1 some were preempted. Completions with the same prompt
        share its full blocks (a continued completion has its own prompt).
        """
        running = waiting = queued = made = blocks = 0
        shared: dict[int, int] = {}  # blocks of each prompt
        long_ago = time.monotonic() - QUEUED_S
        for request_id, (prompt, since) in self._prompts.items():
            for state in self._states(request_id):
                tokens = self._seen[request_id] = state.detokenizer.num_output_tokens()
                made += tokens
                if not tokens:
                    waiting, queued = waiting + 1, queued + (since < long_ago)
                    continue
                running += 1
                shared[prompt] = state.prompt_len // self._kv_block
                blocks += -(-(state.prompt_len + tokens) // self._kv_block) - shared[prompt]
        usage = min((blocks + sum(shared.values())) / self._kv_blocks, 1.0) if self._kv_blocks else 0.0
        return Gauges(running, waiting, queued, usage, self._tokens + made)

    async def close(self) -> None:
        """Fail what is still running, ask vLLM to shut down, then kill what is left."""
        llm, self._started, self._weights = self._started, None, None
        try:
            if llm is not None:
                _cache_environment(False)
                _release(llm)
                async with asyncio.timeout(2 * _CLOSE_S):
                    await asyncio.to_thread(llm.shutdown, _CLOSE_S)
        except TimeoutError:
            pass  # the processes are killed below
        del llm
        for child in multiprocessing.active_children():
            if child.name.startswith("EngineCore") and child.pid not in self._strangers:
                child.kill()
                child.join(1.0)
        if self._sockets is not None:
            self._sockets.remove()
            self._sockets = None


def _cache_environment(cached: bool) -> None:
    """Have vLLM read its variables once, as its engine core does: it looks one up for every token."""
    from vllm.envs import disable_envs_cache, enable_envs_cache

    (enable_envs_cache if cached else disable_envs_cache)()


def _release(llm: AsyncLLM) -> None:
    """Make pending `generate` calls fail, and stop listening to the engine core, whose end would be logged as a crash."""
    from vllm.v1.engine.exceptions import EngineDeadError

    llm.output_processor.propagate_error(EngineDeadError())
    if llm.output_handler is not None:
        llm.output_handler.cancel()
