"""What the generator service costs: tokens/s through claims, verifiers and Redis against bare vLLM on the same prompts.

    python benchmarks/overhead.py --json

Both sides make the same tokens (same prompts, seeds, sampling and engine), alternately, in one process. `ratio` is the
median of the pairwise ratios; the goal is 0.90. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # `python benchmarks/overhead.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import report
from services.console.redis_server import RedisServer
from services.dataprep.loop import ticket_seed
from services.dataprep.prompts import PromptSource
from services.generator.loop import RolloutLoop
from services.generator.metrics import GeneratorMetrics
from services.generator.rewards.pool import VerifierPool
from services.generator.tokenizer import load_tokenizer
from services.generator.vllm_engine import VllmEngine
from services.protocol.config import RunConfig, load
from services.protocol.messages import Ticket
from services.runtime.loops import Loop
from services.runtime.service import open_service

CONCURRENT_GROUPS = 48  # with 8 completions each three times what the demo's engine runs at once: it is never short of work


async def bare(engine: VllmEngine, tickets: Sequence[Ticket], max_tokens: int, round_name: str) -> tuple[float, int]:
    """Seconds and tokens of all completions, straight from vLLM's AsyncLLM."""
    from vllm.inputs.engine import tokens_input

    async def one(ticket: Ticket, sample: int) -> int:
        parameters = engine._parameters(ticket.seed + sample, max_tokens)
        count = 0
        async for output in engine._llm.generate(tokens_input(ticket.prompt), parameters, f"{round_name}-{ticket.id}-{sample}"):
            count = len(output.outputs[0].token_ids)
        return count

    started = time.perf_counter()
    counts = await asyncio.gather(*(one(ticket, i) for ticket in tickets for i in range(ticket.group_size)))
    return time.perf_counter() - started, sum(counts)


async def through_service(config: RunConfig, engine: VllmEngine, tickets: Sequence[Ticket]) -> tuple[float, int]:
    """Seconds and tokens from the first claim to the last submission, scored by the run's verifiers."""
    verifiers = VerifierPool(config.verifiers, config.generator.verifier_workers, config.data.source)
    await verifiers.start()
    async with open_service("generator", config, "generator-0") as service:
        store = service.store
        await store.create("benchmark", "benchmark", 1, len(tickets))
        await store.publish(await store.attach_trainer(), 0)
        engine.version = 0
        rollouts = RolloutLoop(service, engine, load_tokenizer(config), verifiers, GeneratorMetrics(service.registry))
        service.add_loop("leases", rollouts.renew)
        fence = await store.lead("benchmark", 600)
        assert fence is not None
        for start in range(0, len(tickets), 128):
            await store.issue(fence, start, tickets[start : start + 128])
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
        items = await store.read_headers(fence, len(tickets))
        tokens = sum(sum(item.header.lengths) for item in items if item.header is not None)
        await store.delete_run()
    await verifiers.close()
    return elapsed, tokens


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Alternate both sides and report."""
    server = RedisServer(folder / "redis")
    server.start()
    (folder / "token").write_text("benchmark")
    (folder / "password").write_text(server.password)
    config = load(
        options.config,
        [
            f"run.dir={folder}", f"redis.url={server.url}", f"redis.password_file={folder / 'password'}",
            f"api.token_file={folder / 'token'}", f"generator.max_concurrent_groups={CONCURRENT_GROUPS}", *options.set,
        ],
        environ={},
    )  # fmt: skip
    source = PromptSource(config)
    tickets = []
    for row in range(options.groups):
        prompt, answer = source.prompt(row % len(source))
        tickets.append(
            Ticket(f"0-{row}", row, 0, row, ticket_seed(config.run.seed, 0, row), prompt, answer, config.sampling.group_size)
        )
    engine = VllmEngine()
    await engine.start(config)
    try:
        await bare(engine, tickets, config.sampling.max_tokens, "warm-up")
        pairs = []
        for repeat in range(options.repeats):
            bare_s, bare_tokens = await bare(engine, tickets, config.sampling.max_tokens, f"bare{repeat}")
            ours_s, ours_tokens = await through_service(config, engine, tickets)
            assert bare_tokens == ours_tokens, f"other tokens: {bare_tokens} bare, {ours_tokens} through the service"
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print only the last line, one JSON object")
    parser.add_argument("--config", default="examples/arithmetic/config.toml", help="run whose prompts and model are used")
    parser.add_argument("--groups", type=int, default=384, help="tickets a repetition")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of measurements")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a configuration key")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
