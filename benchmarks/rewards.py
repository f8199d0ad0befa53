"""The cost of custom rewards: overhead of a Python function, seats that are idle during scoring, and losses in an outage.

    python -m benchmarks.rewards --json

`overhead_us`: time to score a completion by a Python function in its confined process, minus the call itself, in µs.
`seats_idle_share`: share of an engine's seats that are idle because a verifier takes 2 s: the idle share with it, minus that with
an instant verifier, for the same tickets and a scripted engine. `lost`, `zeros`: tickets without scores, and scores that the
judge did not give, of a generator whose judge hangs, fails, disconnects and dies in turn; `faults`: how often it did. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `python benchmarks/rewards.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report, run
from services.config import RunConfig
from services.console.run.redis_server import RedisServer
from services.generator.loop import GeneratorLoop
from services.generator.metrics import GeneratorMetrics
from services.http.entry import open_service
from services.protocol.messages import Header, Ticket
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.verifiers.base import Job
from services.verifiers.scoring import Scoring
from tests.support.harness import PlainTokenizer, small_config
from tests.support.scripted import ScriptedEngine
from tests.verifiers.remote.flaky_server import FlakyServer

OWN = "def score(completion, answer):\n    return float(answer in completion)\n"
COMPLETION_CHARACTERS = 1200  # about 300 tokens
GROUP = 8
SEATS = 64
TOKENS, TOKEN_S = 48, 0.05  # of the scripted engine: 1.2 s per completion on average, so that seats become free all the time
SCORE_S = 2.0
FAULTS = ("hang", "status:500", "status:503", "retry:0", "close", "die")
JUDGED = 0.75  # the judge's score for everything


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--groups", type=int, default=400, help="groups per pass of the overhead")
    parser.add_argument("--repeats", type=int, default=5, help="passes of the overhead")
    parser.add_argument(
        "--tickets", type=int, default=120, help="tickets of a run with a slow verifier; a run with outages has a sixth"
    )
    return run(measure, parser.parse_args())


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure everything and report."""
    overhead = await overhead_us(folder, options.groups, options.repeats)
    print(f"overhead {statistics.median(overhead):8.1f} us per completion", flush=True)
    server = RedisServer(folder / "redis")
    server.start()
    try:
        with FlakyServer() as service:
            idle = {}
            for score_s in (0.0, SCORE_S):
                service.behave(*[f"slow:{score_s}"] * options.tickets * GROUP)
                idle[score_s] = await idle_share(judged(folder, server, service, 60.0), options.tickets)
                print(f"verifier of {score_s:g} s: {idle[score_s]:.3f} of the seats idle", flush=True)
            lost, zeros, faults = await outages(judged(folder, server, service, 0.5), service, options.tickets // 6)
    finally:
        server.stop()
    report(
        {"benchmark": "rewards", "groups": options.groups, "tickets": options.tickets, "seats": SEATS, "group_size": GROUP},
        {
            "overhead_us": overhead,
            "seats_idle_share": [max(0.0, idle[SCORE_S] - idle[0.0])],
            "seats_idle_without": [idle[0.0]],
            "lost": [lost],
            "zeros": [zeros],
            "faults": [faults],
        },
    )


async def overhead_us(folder: Path, groups: int, repeats: int) -> list[float]:
    """Return, for each pass, the time to score a completion minus that of the bare call, in µs."""
    (folder / "own.py").write_text(OWN)
    own = f'verifiers=[{{kind="python", function="{folder}/own.py:score"}}]'
    config = small_config(folder / "overhead", None, own)
    names: dict[str, Any] = {}
    exec(OWN, names)
    scoring = Scoring(config, config.data.sources, workers=1)
    await scoring.start()
    texts = ["".join(random.Random(i).choices("abcdefgh 0123456789", k=COMPLETION_CHARACTERS)) for i in range(GROUP)]
    found: list[float] = []
    try:
        for _ in range(repeats):
            began = time.perf_counter()
            for _ in range(groups):
                await scoring.score(Job("main", texts, "42"))
            through = time.perf_counter() - began
            began = time.perf_counter()
            for _ in range(groups):
                for text in texts:
                    names["score"](text, "42")
            bare = time.perf_counter() - began
            found.append((through - bare) / (groups * GROUP) * 1e6)
    finally:
        await scoring.close()
    return found


def judged(folder: Path, server: RedisServer, service: FlakyServer, timeout_s: float) -> RunConfig:
    """Return the configuration of a generator whose completions a judge scores, each in its own request."""
    template = "Rate {{ completion }}"
    judge = f'kind="judge", url="{service.url}/v1", model="m", prompt="{template}", timeout_s={timeout_s}'
    return small_config(
        folder / "judged", server, f"verifiers=[{{{judge}}}]", f"sampling.group_size={GROUP}", "data.max_prompt_tokens=8",
        f"sampling.max_tokens={TOKENS}", f"generator.max_num_seqs={SEATS}",
        f"generator.engine_options={{token_s={TOKEN_S}, max_running={SEATS}}}",
    )  # fmt: skip


@dataclass
class Generator:
    """A generator with tickets to claim."""

    service: Service
    engine: ScriptedEngine
    rollouts: GeneratorLoop
    tickets: Sequence[Ticket]

    async def submitted(self) -> list[Header]:
        """Return the headers so far."""
        fence = await self.service.store.run.lead("benchmark", 600)
        assert fence is not None
        items = await self.service.store.replay.read_headers(fence, len(self.tickets))
        return [item.header for item in items if item.header is not None]

    async def ended(self) -> int:
        """Return how many tickets have been submitted or became dead letters."""
        keys, client = self.service.store.keys, self.service.store.client
        return await client.xlen(keys.headers) + await client.xlen(keys.deadletter)


@asynccontextmanager
async def generating(config: RunConfig, count: int) -> AsyncIterator[Generator]:
    """Start a generator that works on `count` tickets until the block ends."""
    verifiers = Scoring(config, config.data.sources)
    await verifiers.start()
    engine = ScriptedEngine()
    await engine.start(config)
    async with open_service("generator", config, "generator-0") as service:
        store = service.store
        await store.run.create("benchmark", "benchmark", 1, count)
        trainer = await store.run.attach_trainer()
        await store.steps.publish(trainer, 0)
        engine.version = 0
        service.say(phase="ready", version=0, world=1, trainer_fence=trainer)
        rollouts = GeneratorLoop(service, engine, PlainTokenizer(), verifiers, GeneratorMetrics(service.registry))
        service.add_loop("leases", rollouts.tickets.renew)
        service.add_loop("concurrency", rollouts.adapt)
        fence = await store.run.lead("benchmark", 600)
        assert fence is not None
        tickets = [Ticket(f"0-{i}", i, 0, i, 1000 * i, [5, 6, 7], "1", GROUP, "main") for i in range(count)]
        for start in range(0, count, 128):
            await store.tickets.issue(fence, start, tickets[start : start + 128])
        done = asyncio.Event()

        async def work(loop: Loop) -> None:
            await service.view.created()
            working = asyncio.create_task(rollouts.work(loop))
            await done.wait()
            service.stop()
            await working

        running = asyncio.create_task(service.run(work))
        try:
            yield Generator(service, engine, rollouts, tickets)
        finally:
            done.set()
            await running
            await store.restores.delete_run()
            await verifiers.close()


async def idle_share(config: RunConfig, count: int) -> float:
    """Return the share of the seats that are idle, from when the engine is full until too few tickets are left to fill it."""
    async with generating(config, count) as made:
        while made.engine.gauges().running < SEATS:
            await asyncio.sleep(0.01)
        looks: list[float] = []
        while (await made.service.store.run.audit())["tickets"] > made.rollouts.limit.groups:
            looks.append(1 - min(SEATS, made.engine.gauges().running) / SEATS)
            await asyncio.sleep(0.02)
        while await made.ended() < count:
            await asyncio.sleep(0.05)
    return statistics.fmean(looks)


async def outages(config: RunConfig, service: FlakyServer, count: int) -> tuple[int, int, int]:
    """Return the tickets without scores, the scores that the judge did not give, and the judge's faults of all kinds."""
    faults = 0
    async with generating(config, count) as made:
        chosen = random.Random(0)
        while await made.ended() < count:
            fault = FAULTS[faults % len(FAULTS)]
            faults += 1
            if fault == "die":
                service.kill()
                await asyncio.sleep(chosen.uniform(0.0, 0.5))
                await asyncio.to_thread(service.start)
            else:
                service.behave(*[fault] * chosen.randrange(1, 8))
            await asyncio.sleep(chosen.uniform(0.05, 0.3))
        headers = await made.submitted()
    scores = [score for header in headers for score in header.scores["judge"]]
    return count - len(headers), sum(score != JUDGED for score in scores), faults


if __name__ == "__main__":
    sys.exit(main())
