"""The cost of the generator service: tokens/s through claims, verifiers and Redis against bare vLLM on the same prompts.

    python benchmarks/overhead.py --json

Both sides generate the same tokens (same prompts, seeds, sampling and engine) alternately in one process. `ratio` is the
median of the pairwise ratios; the goal is 0.90. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # `python benchmarks/overhead.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, configured, report, run
from services.config import RunConfig
from services.console.run.redis_server import RedisServer
from services.dataprep.prompts.catalogue import PromptSource
from services.dataprep.prompts.issuing import ticket_seed
from services.generator.engines.vllm import VllmEngine
from services.generator.engines.vllm_requests import sampling_params
from services.generator.loop import GeneratorLoop
from services.generator.metrics import GeneratorMetrics
from services.generator.pod import load_tokenizer
from services.groups.generated import SamplingParameters
from services.http.entry import open_service
from services.protocol.messages import Ticket
from services.runtime.loops import Loop
from services.verifiers.scoring import Scoring


async def bare(engine: VllmEngine, tickets: Sequence[Ticket], sampling: SamplingParameters, round_name: str) -> tuple[float, int]:
    """Return the seconds and tokens of all completions, directly from vLLM's AsyncLLM."""
    from vllm.inputs.engine import tokens_input

    async def one(ticket: Ticket, sample: int) -> int:
        parameters = sampling_params(sampling, ticket.seed + sample, 0, engine._stop_tokens)
        count = 0
        async for output in engine._llm.generate(tokens_input(ticket.prompt), parameters, f"{round_name}-{ticket.id}-{sample}"):
            count = len(output.outputs[0].token_ids)
        return count

    started = time.perf_counter()
    counts = await asyncio.gather(*(one(ticket, i) for ticket in tickets for i in range(ticket.group_size)))
    return time.perf_counter() - started, sum(counts)


async def through_service(config: RunConfig, engine: VllmEngine, tickets: Sequence[Ticket]) -> tuple[float, int]:
    """Return the seconds and tokens from the first claim to the last submission, scored by the run's verifiers."""
    verifiers = Scoring(config, config.data.sources)
    await verifiers.start()
    async with open_service("generator", config, "generator-0") as service:
        store = service.store
        await store.run.create("benchmark", "benchmark", 1, len(tickets))
        trainer = await store.run.attach_trainer()
        await store.steps.publish(trainer, 0)
        engine._loaded.version = 0
        service.say(phase="ready", version=0, trainer_fence=trainer)
        rollouts = GeneratorLoop(service, engine, load_tokenizer(config), verifiers, GeneratorMetrics(service.registry))
        service.add_loop("leases", rollouts.tickets.renew)
        service.add_loop("concurrency", rollouts.adapt)
        fence = await store.run.lead("benchmark", 600)
        assert fence is not None
        for start in range(0, len(tickets), 128):
            await store.tickets.issue(fence, start, tickets[start : start + 128])
        elapsed = 0.0

        async def until_submitted(loop: Loop) -> None:
            nonlocal elapsed
            await service.view.created()
            started = time.perf_counter()
            working = asyncio.create_task(rollouts.work(loop))
            while await store.client.xlen(store.keys.headers) < len(tickets):
                await asyncio.sleep(0.02)
            elapsed = time.perf_counter() - started
            service.stop()
            await working

        await service.run(until_submitted)
        items = await store.replay.read_headers(fence, len(tickets))
        tokens = sum(sum(item.header.lengths) for item in items if item.header is not None)
        await store.restores.delete_run()
    await verifiers.close()
    return elapsed, tokens


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Alternate both sides and report."""
    server = RedisServer(folder / "redis")
    server.start()
    config = configured(options.config, folder, server, *options.set)
    source = PromptSource(config)
    tickets = []
    for row in range(options.groups):
        prompt = source.prompt(row % len(source))
        seed, name = ticket_seed(config.run.seed, 0, row), source.name_of(row % len(source))
        tickets.append(Ticket(f"0-{row}", row, 0, row, seed, prompt.tokens, prompt.answer, config.sampling.group_size, name))
    engine = VllmEngine()
    await engine.start(config)
    try:
        await bare(engine, tickets, SamplingParameters.of(config, None), "warm-up")
        pairs = []
        for repeat in range(options.repeats):
            bare_s, bare_tokens = await bare(engine, tickets, SamplingParameters.of(config, None), f"bare{repeat}")
            ours_s, ours_tokens = await through_service(config, engine, tickets)
            assert bare_tokens == ours_tokens, f"token counts differ: {bare_tokens} bare, {ours_tokens} through the service"
            pairs.append((bare_tokens / bare_s, ours_tokens / ours_s))
            print(f"bare {pairs[-1][0]:8.0f} tokens/s   service {pairs[-1][1]:8.0f} tokens/s", flush=True)
    finally:
        await engine.close()
        server.stop()
    report(
        {
            "benchmark": "overhead",
            "groups": options.groups,
            "group_size": config.sampling.group_size,
            "max_tokens": config.sampling.max_tokens,
        },
        {
            "ratio": [ours / theirs for theirs, ours in pairs],
            "bare_tokens_per_s": [theirs for theirs, _ in pairs],
            "service_tokens_per_s": [ours for _, ours in pairs],
        },
    )


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--config", default="examples/arithmetic/config.toml", help="run whose prompts and model are used")
    parser.add_argument("--groups", type=int, default=384, help="tickets per repetition")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of measurements")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a configuration key")
    options = parser.parse_args()
    return run(measure, options)


if __name__ == "__main__":
    sys.exit(main())
