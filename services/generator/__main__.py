"""Start a generator pod: load the engine, wait for weights, then claim and complete tickets until told to stop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

from services.runtime.entry import Arguments, main, open_service
from services.runtime.loops import Broken, Fatal, Loop

LOOP_LIMIT_S = 60.0
ROUND_S = 3.0  # beyond the drain: how long a weight-sync round that counts on this pod may still take


async def generate(given: Arguments) -> None:
    """The whole life of the pod."""
    from services.generator.api import add_routes
    from services.generator.engine import EngineDead, make_engine
    from services.generator.evaluation import EvaluationLane
    from services.generator.loop import RolloutLoop
    from services.generator.metrics import GeneratorMetrics
    from services.generator.pausing import Pausing
    from services.generator.rewards.base import VerifierFailure
    from services.generator.rewards.pool import VerifierPool
    from services.generator.tokenizer import load_tokenizer
    from services.generator.weights import WeightFollower

    config = given.config
    async with open_service("generator", config, given.name) as service:
        metrics = GeneratorMetrics(service.registry)
        engine = make_engine(config)
        sources = [*config.data.sources, *config.evaluation.sources]
        verifiers = VerifierPool(config.verifiers, config.generator.verifier_workers, sources)
        tokenizer = load_tokenizer(config)
        evaluation = EvaluationLane(service, engine, tokenizer, verifiers, metrics)
        rollouts = RolloutLoop(service, engine, tokenizer, verifiers, metrics, evaluation)
        weights = WeightFollower(service, engine, metrics, evaluation, rollouts.in_flight)
        pausing = Pausing(service, weights, (rollouts, evaluation))
        service.ready = rollouts.why_idle
        add_routes(service, rollouts)
        loaded = asyncio.Event()

        async def work(loop: Loop) -> None:
            service.say(phase="loading")
            loop.limit_s = float("inf")  # loading takes as long as it takes
            try:
                await verifiers.start()
                await engine.start(config)
            except VerifierFailure as error:
                raise Fatal(f"verifiers cannot be started: {error}") from None
            except EngineDead as error:
                raise Broken(str(error)) from None
            if not await service.created():
                return
            loop.limit_s = LOOP_LIMIT_S + config.generator.drain_s
            service.say(phase="unsynced", world=engine.world)
            loaded.set()
            await rollouts.work(loop)
            await evaluation.drain()
            if not service.view.ended:
                await weights.released(ROUND_S)

        service.add_loop("weights", _after(loaded, weights.follow))
        service.add_loop("pause", _after(loaded, pausing.follow), LOOP_LIMIT_S)
        service.add_loop("leases", _after(loaded, rollouts.renew), LOOP_LIMIT_S + config.generator.lease_s)
        service.add_loop("partials", _after(loaded, rollouts.save_partials), LOOP_LIMIT_S + config.generator.partial_every_s)
        service.add_loop("evaluation", _after(loaded, evaluation.work))
        service.add_loop("evaluation leases", _after(loaded, evaluation.renew), LOOP_LIMIT_S + config.generator.lease_s)
        service.add_loop("concurrency", _after(loaded, rollouts.adapt))
        service.add_loop("gauges", _after(loaded, rollouts.show_gauges), LOOP_LIMIT_S + config.fleet.heartbeat_s)
        try:
            await service.run(work)
        finally:
            await verifiers.close()
            await engine.close()


def _after(loaded: asyncio.Event, body: Callable[[Loop], Awaitable[None]]) -> Callable[[Loop], Awaitable[None]]:
    """A loop that begins when the engine is loaded; until then it has nothing to show progress of."""

    async def run(loop: Loop) -> None:
        limit_s, loop.limit_s = loop.limit_s, float("inf")
        await loaded.wait()
        loop.progress()
        loop.limit_s = limit_s
        await body(loop)

    return run


if __name__ == "__main__":
    sys.exit(main("generator", generate))
