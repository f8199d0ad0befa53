"""Serves completions to environments, which hold the tickets: `POST /v1/generate`, tokens in, tokens out.

Guarantees: only published weights sample, as for the pod's own tickets; a completion that a drain cuts off is
returned with its tokens so far, to be continued elsewhere; a completion whose caller has disconnected is dropped; an engine
that has died ends the process, as it does with the pod's own tickets. Waits for: the engine. Unblocked by: the engine, or the
caller's disconnection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from services.config import RunConfig
from services.generator.engines.base import Engine
from services.groups.generated import Generated, GenerationFailed, SamplingParameters
from services.groups.records import pack_partial, unpack_partial
from services.protocol import codec
from services.protocol.payloads import GenerationRequest
from services.weights.receiver import EngineDead

REQUEST_BYTES = 16 << 20
"""Maximum size of a request in bytes: a context of a million tokens, and as many tokens of a completion to continue."""
ABORTED_S = 1.0  # for completions that the engine has stopped to reach their callers
QUEUE_TIMES = 4  # completions that may be in progress, as a multiple of those that the engine runs at a time


class NotServed(Exception):
    """The pod does not serve the request. `status` is that of HTTP: 503, ask another pod or later; 422, never."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def read_request(body: bytes) -> GenerationRequest:
    """Decode a request. Raises `NotServed`."""
    try:
        return codec.decode(body, GenerationRequest)
    except codec.CorruptMessage as error:
        raise NotServed(422, str(error)) from None


class Serving:
    """Completions that environments wait for."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        obstacle: Callable[[GenerationRequest], str],
        died: Callable[[EngineDead], None],
    ) -> None:
        """`obstacle` returns why the pod cannot serve a request now, or ""; `died` is called once the engine has died."""
        self._config, self._engine = config, engine
        self._obstacle, self._died = obstacle, died
        self._running: dict[str, asyncio.Task[Generated]] = {}
        self._evaluated: set[str] = set()  # requests of an evaluation

    def __len__(self) -> int:
        return len(self._running)

    async def generate(self, request: GenerationRequest, gone: Callable[[], asyncio.Future[None]]) -> bytes:
        """Complete a request and return the encoded `Partial`. Raises `NotServed`.

        `gone` returns a future that completes once nobody waits for the reply.
        """
        prefix = self._prefix(request)
        if why := self._obstacle(request):
            raise NotServed(503, why)
        if len(self._running) >= QUEUE_TIMES * self._config.generator.max_num_seqs:
            raise NotServed(503, f"{len(self._running)} completions are in progress, as many as this pod takes")
        if held := self._running.pop(request.id, None):  # its caller sent it again: the first reply was lost
            held.cancel()
        sampling = replace(SamplingParameters.of(self._config, request.version), max_tokens=request.max_tokens)
        task = asyncio.create_task(
            self._engine.generate(request.id, request.prompt.tolist(), request.seed, sampling, prefix), name=request.id
        )
        self._running[request.id] = task
        if request.version is not None:
            self._evaluated.add(request.id)
        left = gone()
        try:
            await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise NotServed(503, "the caller is gone")
            return pack_partial([await task])
        except asyncio.CancelledError:
            raise NotServed(503, "dropped: another request of the same id came, or the pod hands back its work") from None
        except GenerationFailed as error:
            raise NotServed(422, str(error)) from None
        except EngineDead as error:
            self._died(error)
            raise NotServed(503, f"the engine has died: {error}") from None
        finally:
            left.cancel()
            task.cancel()
            if self._running.get(request.id) is task:
                del self._running[request.id]
                self._evaluated.discard(request.id)

    async def abort(self, evaluated: bool = False) -> None:
        """Return all completions in progress to their callers, with their tokens so far, or only those of an evaluation.

        Those that the engine does not have are dropped: nothing was sampled for them here.
        """
        while requests := list(self._evaluated if evaluated else self._running):
            await self._engine.abort(requests)
            if tasks := [self._running[request] for request in requests if request in self._running]:  # most have left by now
                await asyncio.wait(tasks, timeout=ABORTED_S)
            sampling = self._engine.snapshot(requests)
            for request in requests:
                if request in self._running and request not in sampling:
                    self._running[request].cancel()
            await asyncio.sleep(0)  # lets those that have ended leave

    def _prefix(self, request: GenerationRequest) -> Generated | None:
        """Return the tokens that a valid request continues."""
        prompt, limit = request.prompt, self._config.model.max_tokens
        if prompt.ndim != 1 or prompt.dtype.kind != "i" or not 0 < len(prompt) <= limit - request.max_tokens:
            raise NotServed(
                422, f"a context of shape {prompt.shape} and {request.max_tokens} tokens after it do not fit into {limit}"
            )
        vocabulary = self._engine.vocabulary
        if prompt.min() < 0 or prompt.max() >= vocabulary or request.max_tokens < 1:
            raise NotServed(422, f"token ids must be in 0..{vocabulary - 1}, and max_tokens at least 1")
        if not request.prefix:
            return None
        [prefix] = unpack_partial(request.prefix, 1, request.max_tokens, vocabulary)
        return prefix
