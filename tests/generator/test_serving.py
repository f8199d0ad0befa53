"""Completions for environments: a real HTTP endpoint of a real pod, with the scripted engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest

from services.console.run.redis_server import RedisServer
from services.generator import loop as loops
from services.generator.api import GENERATE, add_routes
from services.generator.serving import NotServed
from services.groups.generated import Generated
from services.groups.records import pack_partial
from services.http.credentials import api_tokens
from services.protocol import codec
from services.protocol.errors import StoreError
from services.protocol.messages import Span
from services.protocol.payloads import GenerationRequest, Partial
from services.runtime.loops import Broken, Loop
from services.store import Claim
from services.weights.receiver import EngineDead
from tests.generator.test_loop import generator
from tests.support.harness import PlainTokenizer, ticket, wait_until

PROMPT = np.array([5, 6, 7], np.int32)


def asked(request_id: str = "0-1.7.0", max_tokens: int = 40, prefix: bytes = b"", prompt: np.ndarray = PROMPT) -> bytes:
    return codec.encode(GenerationRequest(request_id, prompt, 3, max_tokens, prefix))


async def test_another_pod_continues_a_completion_cut_off_by_a_drain(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server, "model.max_tokens=4096") as (service, loop, engine):
        add_routes(service, loop)
        engine._token_s = 0.02
        script = engine.script([5, 6, 7], 3, 40)
        await service.view.refresh()
        headers = {"Authorization": f"Bearer {api_tokens(service.config).operate}"}
        async with httpx.AsyncClient(base_url=service.status.url, headers=headers, timeout=30.0) as http:
            assert (await http.post(GENERATE, content=asked(), headers={"Authorization": "Bearer wrong"})).status_code == 401
            pending = asyncio.create_task(http.post(GENERATE, content=asked()))
            await wait_until(lambda: engine.gauges().tokens > 0)
            assert loop.busy
            await loop.serving.abort()
            cut = await pending
            part = codec.decode(cut.content, Partial)
            assert (cut.status_code, part.finish) == (200, [""])
            assert 0 < len(part.tokens) < len(script)
            engine._token_s = 0.0
            whole = codec.decode((await http.post(GENERATE, content=asked(prefix=cut.content))).content, Partial)
            assert (whole.tokens.tolist(), whole.finish) == (script, ["stop"])
            assert not loop.busy


async def test_a_completion_whose_caller_left_is_dropped(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server, "model.max_tokens=4096") as (service, loop, engine):
        add_routes(service, loop)
        engine._token_s = 5.0
        await service.view.refresh()
        headers = {"Authorization": f"Bearer {api_tokens(service.config).operate}"}
        async with httpx.AsyncClient(base_url=service.status.url, headers=headers) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(GENERATE, content=asked(), timeout=httpx.Timeout(30.0, read=0.2))
        await wait_until(lambda: not loop.busy and not engine.snapshot())


async def test_a_request_sent_again_takes_the_place_of_the_first(tmp_path: Path, server: RedisServer) -> None:
    """Its caller has lost the connection, and no longer waits for the first reply."""
    async with generator(tmp_path, server, "model.max_tokens=4096") as (service, loop, engine):
        gone = asyncio.get_running_loop().create_future
        await service.view.refresh()
        engine._token_s = 0.02
        first = asyncio.create_task(loop.serve(asked(), gone))
        await wait_until(lambda: engine.gauges().tokens > 0)
        second = asyncio.create_task(loop.serve(asked(), gone))
        with pytest.raises(NotServed, match="another request of the same id came"):
            await first
        assert len(loop.serving) == 1, "it still waits for the second reply"
        assert codec.decode(await second, Partial).tokens.tolist() == engine.script([5, 6, 7], 3, 40)
        assert not loop.busy


async def test_a_completion_asked_for_before_an_update_is_published_waits_for_it(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server, "model.max_tokens=4096") as (service, loop, engine):
        await service.view.refresh()
        gone = asyncio.get_running_loop().create_future
        engine.version = 1  # the pod has applied the next version, but others have not
        with pytest.raises(NotServed, match="0 is published"):
            await loop.serve(asked(), gone)
        pending = asyncio.create_task(loop.serve(asked(), gone))
        await asyncio.sleep(0.05)
        assert not pending.done()
        await service.store.client.hset(service.store.keys.run, "published_version", 1)  # type: ignore[misc]
        await service.view.refresh()
        assert codec.decode(await pending, Partial).finish == ["stop"]


async def test_weights_of_a_trainer_that_was_replaced_are_not_sampled(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that retrains a version may not end with the same weights."""
    monkeypatch.setattr(loops, "PUBLISHED_S", 60.0)
    async with generator(tmp_path, server, "model.max_tokens=4096") as (service, loop, engine):
        gone = asyncio.get_running_loop().create_future
        fence = await service.store.run.attach_trainer()
        await service.view.refresh()
        assert loop.why_idle() == ""
        assert codec.decode(await loop.serve(asked(), gone), Partial).finish == ["stop"], "nothing else is published yet"
        service.say(trainer_fence=fence)
        assert "of another trainer" in loop.why_idle()
        pending = asyncio.create_task(loop.serve(asked(), gone))
        await asyncio.sleep(0.05)
        assert not pending.done(), "the new trainer publishes as soon as the other pods have its weights"
        await service.store.steps.publish(fence, 0)
        await service.view.refresh()
        assert codec.decode(await pending, Partial).finish == ["stop"]
        assert loop.why_idle() == ""
        service.say(trainer_fence=fence - 1)
        assert "of another trainer" in loop.why_idle()
        with pytest.raises(NotServed, match="of another trainer"):
            await asyncio.wait_for(loop.serve(asked(), gone), 20)
        assert not engine.snapshot()


async def test_a_drain_hands_back_from_an_engine_whose_aborts_wait(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's do: when they return, the completions have left."""
    async with generator(tmp_path, server, "model.max_tokens=4096") as (service, loop, engine):
        await service.view.refresh()
        abort = engine.abort

        async def waiting(names: list[str]) -> None:
            await abort(names)
            await wait_until(lambda: not loop.busy)

        monkeypatch.setattr(engine, "abort", waiting)
        engine._token_s = 0.05
        pending = asyncio.create_task(loop.serve(asked(max_tokens=40), asyncio.get_running_loop().create_future))
        await wait_until(lambda: loop.busy)
        await loop.serving.abort()
        assert codec.decode(await pending, Partial).finish == [""], "it can be continued"


async def test_a_round_is_left_by_the_next_attempt_if_the_first_fails(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, resigned = list[Claim](), list[str]()

    async def release(_: str, claim: Claim, tokens: int) -> bool:
        released.append(claim)
        return True

    async def resign(member: str) -> None:
        resigned.append(member)
        if len(resigned) == 1:
            raise StoreError("Redis is restarting")

    async with generator(tmp_path, server, "model.max_tokens=4096") as (service, loop, engine):
        await service.view.refresh()
        loop.evaluation.version = engine.version
        engine._token_s = 1.0
        monkeypatch.setattr(service.store.tickets, "release", release)
        monkeypatch.setattr(service.store.evaluation, "resign", resign)
        claim = Claim("2-1", 1, "0-0", b"", ticket(0, version=0))
        await loop.tickets.start(claim)
        with pytest.raises(StoreError):
            await loop.return_to_training()
        assert loop.evaluating
        await loop.return_to_training()
        assert not loop.evaluating
        assert (released, resigned) == ([claim], [service.status.member] * 2)


async def test_a_volunteer_that_could_not_resign_serves_its_round(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*given: object) -> None:
        raise StoreError("Redis is restarting")

    async with generator(tmp_path, server, "model.max_tokens=4096") as (service, loop, engine):
        await service.view.refresh()
        loop.evaluation.version = engine.version
        monkeypatch.setattr(service.store.evaluation, "resign", lost)
        with pytest.raises(StoreError):
            await loop.return_to_training()
        request = codec.encode(GenerationRequest("0", PROMPT, 3, 40, version=engine.version))
        reply = await loop.serve(request, asyncio.get_running_loop().create_future)
        assert codec.decode(reply, Partial).finish == ["stop"]


@pytest.mark.parametrize("evaluating", [False, True])
async def test_an_engine_that_dies_of_a_request_of_another_pod_ends_the_process(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, evaluating: bool
) -> None:
    """No ticket of its own may ever tell the pod, since environments hold them all."""

    async def dead(*given: object) -> Generated:
        raise EngineDead("the core died")

    for pause in ("IDLE_S", "SPARE_S"):
        monkeypatch.setattr(loops, pause, 60.0)
    async with generator(tmp_path, server, "model.max_tokens=4096") as (service, loop, engine):
        await service.view.refresh()
        version = engine.version if evaluating else None
        loop.evaluation.version = version
        monkeypatch.setattr(loop.evaluation, "goes_on", _yes)  # otherwise it would find no round and return to training
        monkeypatch.setattr(engine, "generate", dead)
        working = asyncio.create_task(loop.work(Loop("work", loop.work, 60.0)))
        request = codec.encode(GenerationRequest("0", PROMPT, 3, 40, version=version))
        with pytest.raises(NotServed, match="the engine has died: the core died") as refusal:
            await loop.serve(request, asyncio.get_running_loop().create_future)
        assert refusal.value.status == 503
        with pytest.raises(Broken, match="the core died"):
            await asyncio.wait_for(working, 20)


async def _yes() -> bool:
    return True


async def test_only_ids_beyond_the_models_vocabulary_are_rejected(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server, "model.max_tokens=4096") as (service, loop, engine):
        await service.view.refresh()
        engine.vocabulary = len(PlainTokenizer()) + 8  # embeddings are often padded, and padding tokens may be sampled
        gone = asyncio.get_running_loop().create_future
        last = np.array([5, 6, engine.vocabulary - 1], np.int32)
        assert codec.decode(await loop.serve(asked(prompt=last), gone), Partial).finish == ["stop"]
        with pytest.raises(NotServed, match="token ids must be in"):
            await loop.serve(asked(prompt=last + 1), gone)
        script = engine.script([5, 6, 7], 3, 40)
        strange = Generated(np.array([engine.vocabulary], np.int32), np.zeros(1, np.float32), [Span(0, 0, 1)], "aborted")
        fresh = codec.decode(await loop.serve(asked(prefix=pack_partial([strange])), gone), Partial)
        assert fresh.tokens.tolist() == script, "an engine would die of the prefix"


async def test_invalid_requests_are_rejected_with_the_reason(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server) as (service, loop, engine):
        add_routes(service, loop)
        await service.view.refresh()
        headers = {"Authorization": f"Bearer {api_tokens(service.config).operate}"}
        async with httpx.AsyncClient(base_url=service.status.url, headers=headers) as http:
            for body, part in (
                (b"garbage", "not a GenerationRequest"),
                (asked(max_tokens=1 << 20), "do not fit"),
                (asked(max_tokens=0), "max_tokens at least 1"),
                (asked(prompt=np.array([-1], np.int32)), "token ids must be in"),
                (asked(prompt=np.zeros(0, np.int32)), "do not fit"),
            ):
                reply = await http.post(GENERATE, content=body)
                assert (reply.status_code, part in reply.text) == (422, True), reply.text
            engine.version = -1
            reply = await http.post(GENERATE, content=asked(max_tokens=4))
            assert (reply.status_code, "unsynced" in reply.text) == (503, True)
