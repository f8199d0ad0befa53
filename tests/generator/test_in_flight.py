"""In-flight completions during a weight update: the scripted engine, paused by hand as in a sync round."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.config import ConfigError
from services.console.run.redis_server import RedisServer
from services.generator.in_flight import InFlight
from services.generator.metrics import GeneratorMetrics
from services.protocol.messages import Span
from services.rollouts.generated import Generated, SamplingParameters
from tests.support.harness import small_config, wait_until
from tests.support.scripted import ScriptedEngine, scripted_tokens

SAMPLING = SamplingParameters(64)
SEED = next(seed for seed in range(100) if len(scripted_tokens([5, 6], seed, 64, 4, 100)) > 40)
LENGTH = len(scripted_tokens([5, 6], SEED, 64, 4, 100))


class Pod:
    """A generator's engine with the in-flight completions around it."""

    def __init__(self, folder: Path, server: RedisServer, *overrides: str) -> None:
        self.config = small_config(folder, server, *overrides)
        self.engine, self.registry = ScriptedEngine(), CollectorRegistry()
        self.in_flight = InFlight(self.config, self.engine, GeneratorMetrics(self.registry))

    async def start(self) -> None:
        await self.engine.start(self.config)
        self.engine.version = 0

    def begin(self, name: str = "r", prefix: Generated | None = None) -> asyncio.Task[Generated]:
        return asyncio.create_task(self.in_flight.generate(name, [5, 6], SEED, SAMPLING, prefix))

    async def update(self, version: int, frozen: bool = False) -> None:
        """Update the weights as a sync round does."""
        await self.in_flight.quiesce(frozen)
        await self.engine.pause()
        self.engine.version = version
        await self.engine.resume()
        self.in_flight.resume()

    async def made(self, tokens: int) -> None:
        """Wait until the completion has `tokens` tokens."""

        async def so_far() -> bool:
            running = self.engine.snapshot().get("r")
            return running is not None and len(running.tokens) >= tokens

        await wait_until(so_far)

    @property
    def discarded(self) -> float | None:
        return self.registry.get_sample_value("grpo_generator_discarded_tokens_total")


async def test_kept_completions_continue_with_the_new_weights(tmp_path: Path, server: RedisServer) -> None:
    pod = Pod(tmp_path, server, "generator.engine_options.token_s=0.03")
    await pod.start()
    running = pod.begin()
    await pod.made(8)
    await pod.update(1)
    done = await running
    assert [span.version for span in done.spans] == [0, 1]
    assert pod.discarded == 0


async def test_drained_completions_finish_with_the_old_weights(tmp_path: Path, server: RedisServer) -> None:
    pod = Pod(tmp_path, server, "generator.engine_options.token_s=0.03", "sync.in_flight=drain")
    await pod.start()
    running = pod.begin()
    await pod.made(8)
    update = asyncio.create_task(pod.update(1))
    await asyncio.sleep(0)  # the round has started to wait
    late = pod.begin("late")
    done, after = await running, await late
    await update
    assert (done.spans, after.spans) == ([Span(0, 0, LENGTH)], [Span(1, 0, LENGTH)])
    assert pod.discarded == 0


@pytest.mark.parametrize("overrides", [("sync.in_flight=drain", "sync.join_deadline_s=0.4"), ("sync.in_flight=abort",)])
async def test_completions_not_drained_in_time_restart(tmp_path: Path, server: RedisServer, overrides: tuple[str, ...]) -> None:
    pod = Pod(tmp_path, server, "generator.engine_options.token_s=0.03", *overrides)
    await pod.start()
    running = pod.begin()
    await pod.made(4)
    await pod.update(1)
    done = await running
    assert done.spans == [Span(1, 0, LENGTH)]
    assert done.tokens.tolist() == scripted_tokens([5, 6], SEED, 64, 4, 100).tolist()
    assert (pod.discarded or 0) >= 4


async def test_a_frozen_engine_is_not_awaited(tmp_path: Path, server: RedisServer) -> None:
    pod = Pod(tmp_path, server, "generator.engine_options.token_s=0.03", "sync.in_flight=drain")
    await pod.start()
    running = pod.begin()
    await pod.made(4)
    await asyncio.wait_for(pod.update(1, frozen=True), pod.config.sync.drain_deadline_s / 2)
    assert (await running).spans == [Span(1, 0, LENGTH)]


async def test_only_keep_continues_an_older_prefix(tmp_path: Path, server: RedisServer) -> None:
    for overrides, versions in (((), [0, 1]), (("sync.in_flight=abort",), [1])):
        pod = Pod(tmp_path, server, "generator.engine_options.token_s=0.03", *overrides)
        await pod.start()
        running = pod.begin()
        await pod.made(8)
        await pod.engine.abort()
        prefix = await running
        assert prefix.finish == "aborted", "an abort without an update is reported to the caller"
        pod.engine.version = 1
        done = await pod.begin(prefix=prefix)
        assert [span.version for span in done.spans] == versions


def test_obsolete_or_ineffective_sync_keys_are_rejected(tmp_path: Path, server: RedisServer) -> None:
    for overrides, why in (
        (["sync.drain_deadline_s=3"], "sync.drain_deadline_s = 3 was removed, and half of sync.join_deadline_s or"),
        (["sync.folder=/x"], 'no effect with sync.backend = "auto"'),
    ):
        with pytest.raises(ConfigError, match=why):
            small_config(tmp_path, server, *overrides)
