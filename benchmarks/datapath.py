"""The cost of the data path: groups/s from claim to commit, against raw pipelined SET and GET of the same bytes.

    python benchmarks/datapath.py --json

One repetition takes `--groups` groups of 40 KB through the store's own calls, as the services make them: issue, claim, submit
(one group at a time, `CONCURRENT` in flight), read and settle headers, plan and prepare steps, fetch and decode each payload,
commit, publish. The raw side writes and reads the same bytes with pipelines of the same client library on the same server, with
as many groups per request and as many requests in flight. The sides alternate in one process, where three concurrent tasks stand
for the three services of a run. `ratio` excludes what they compute beyond the data path (packing, statistics), since the raw side
computes nothing. It is the median of the pairwise ratios; the goal is 0.4. `dataprep_us_per_group` is the CPU time of the
dataprep side with all its computation, measured with the three tasks run one after another. The server counts, over the same
groups: `calls_per_group`, functions called; `commands_per_group`, all commands executed, including those inside functions;
`wire_over_payload`, bytes received and sent over twice the payloads' bytes (each travels in once and out once). `commands` has
the count of every command per group. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # `python benchmarks/datapath.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import group_arguments, report, run, whole_steps
from services.console.run.redis_server import RedisServer
from services.dataprep.planning.plan import Layout, PlanGroup, plan_step
from services.dataprep.replay import admission
from services.groups import advantages, group_statistics
from services.operations.inspection.ledger import audit
from services.protocol import codec
from services.protocol.messages import Header, RankPlan, Sample, StepPlan, Ticket
from services.protocol.payloads import Payload
from services.store import BufferedGroup, Claim, Settlement, Store
from services.store.tickets import REQUESTS_UNDER_WAY, SUBMITTED_TOGETHER

GROUP_SIZE = 16
COMPLETION_TOKENS = 310  # each an int32 and a float32: 16 completions make 40 KB
PROMPT_TOKENS = 60
ROW_TOKENS, RANKS = 4096, 2
LEASE_S, TTL_S = 60.0, 600
CONCURRENT = 32  # groups that a generator has in flight
ISSUE_BATCH, SETTLE_BATCH = 128, 256  # as in services/dataprep/loop.py


@dataclass(frozen=True)
class Times:
    """Measurements of one repetition."""

    wall_s: float
    dataprep_s: float
    """CPU seconds of this process for the dataprep side, if it ran alone; otherwise 0."""
    left_bytes: int
    """Bytes that the server holds more than before, once all steps are trained and covered by a checkpoint."""
    commands: Mapping[str, int] = field(default_factory=dict)
    """How often the server executed each command, including those inside functions."""
    wire_bytes: int = 0
    """Bytes that the server received and sent."""


def make_tickets(count: int) -> list[Ticket]:
    """Return tickets with prompts of a typical length."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 30_000, (count, PROMPT_TOKENS)).tolist()
    return [Ticket(f"0-{i}", i, 0, i, 1000 * i, prompt, str(i), GROUP_SIZE, "main") for i, prompt in enumerate(prompts)]


def make_payload(seed: int) -> bytes:
    """Return a payload of 40 KB that does not compress."""
    rng = np.random.default_rng(seed)
    total = GROUP_SIZE * COMPLETION_TOKENS
    payload = Payload(
        rng.integers(0, 30_000, PROMPT_TOKENS, np.int32), np.full(GROUP_SIZE, COMPLETION_TOKENS, np.int32),
        rng.integers(0, 30_000, total, np.int32), -rng.random(total, np.float32),
        np.array([[i, 0, 0, COMPLETION_TOKENS] for i in range(GROUP_SIZE)], np.int32),
    )  # fmt: skip
    return codec.encode(payload)


def make_header(claim: Claim, payload: bytes) -> Header:
    """Return the header that a generator would write for the payload."""
    ticket = claim.ticket
    assert ticket is not None
    rewards = [float((ticket.index + i) % 3 == 0) for i in range(GROUP_SIZE)]
    return Header(
        ticket.id, ticket.seq, ticket.epoch, ticket.index, claim.payload, len(payload), PROMPT_TOKENS,
        [COMPLETION_TOKENS] * GROUP_SIZE, rewards, {"math": rewards}, [False] * GROUP_SIZE, [0] * GROUP_SIZE, [0] * GROUP_SIZE,
        "generator-0", 1.0, 0.1, "main", [0] * GROUP_SIZE,
    )  # fmt: skip


def bare_plan(step: int, groups: Sequence[BufferedGroup]) -> tuple[StepPlan, list[RankPlan]]:
    """Return a plan of the usual size that takes almost no time to make: one row per group, alternating between the ranks."""
    rows = [[Sample(group.header.payload, i, 0.5, COMPLETION_TOKENS) for i in range(GROUP_SIZE)] for group in groups]
    tokens = len(groups) * GROUP_SIZE * COMPLETION_TOKENS
    names, count = [group.group for group in groups], len(groups) // RANKS
    plan = StepPlan(step, names, names, RANKS, count, [count], [float(tokens)], tokens, tokens, {})
    return plan, [RankPlan(rows[rank::RANKS]) for rank in range(RANKS)]


def whole_plan(step: int, groups: Sequence[BufferedGroup]) -> tuple[StepPlan, list[RankPlan]]:
    """Return a plan as dataprep makes it: advantages, balance over ranks, packing, statistics."""
    headers = [group.header for group in groups]
    given = [advantages.advantages(header.rewards, "standard") for header in headers]
    planned = [
        PlanGroup(
            header.ticket, header.payload, header.prompt_tokens, np.asarray(header.lengths), advantage,
            advantages.trained(header.truncated, False), np.asarray(header.tool_tokens),
        )
        for header, advantage in zip(headers, given, strict=True)
    ]  # fmt: skip
    stats = group_statistics.trained(headers, step, [0] * len(headers), ["main"])
    return plan_step(step, planned, Layout(RANKS, ROW_TOKENS), stats)


async def counted(client: Any) -> tuple[Counter[str], int]:
    """Return the commands that the server has executed since it started, by name, and its bytes in and out."""
    info = await client.info("everything")
    commands = Counter({name.removeprefix("cmdstat_"): of["calls"] for name, of in info.items() if name.startswith("cmdstat_")})
    return commands, info["total_net_input_bytes"] + info["total_net_output_bytes"]


async def used_bytes(client: Any) -> int:
    """Return the memory of all keys on the server, including their values."""
    return sum([await client.memory_usage(key, samples=0) or 0 async for key in client.scan_iter(count=1000)])


async def work(
    generators: Coroutine[Any, Any, None], dataprep: Coroutine[Any, Any, None], trainer: Coroutine[Any, Any, None], together: bool
) -> float:
    """Run the three sides together, or one after another to measure and return the CPU seconds of dataprep."""
    if together:
        await asyncio.gather(generators, dataprep, trainer)
        return 0.0
    await generators
    cpu = time.process_time()
    await dataprep
    dataprep_s = time.process_time() - cpu
    await trainer
    return dataprep_s


class Ours:
    """Our data path: one run, from tickets to commits."""

    def __init__(self, store: Store, payloads: Sequence[bytes], groups: int, prompts_per_step: int) -> None:
        self.store, self.payloads, self.groups, self.prompts_per_step = store, payloads, groups, prompts_per_step
        self.tickets = make_tickets(groups)
        self.headers, self.steps = asyncio.Event(), asyncio.Event()  # what notifications do between processes
        self.prepared, self.published = -1, 0
        self.plan = bare_plan

    async def run(self, together: bool) -> Times:
        """Do one repetition on a fresh run, its three sides together or, to measure their CPU time, one after another."""
        store = self.store
        before = await used_bytes(store.client)
        await store.run.create("benchmark", "benchmark", self.groups // self.prompts_per_step, self.groups)
        fence, trainer = await store.run.lead("benchmark", 600), await store.run.attach_trainer()
        assert fence is not None
        self.trainer = trainer
        await store.steps.publish(trainer, 0)
        commands, wire_bytes = await counted(store.client)
        started = time.perf_counter()
        for start in range(0, self.groups, ISSUE_BATCH):
            await store.tickets.issue(fence, start, self.tickets[start : start + ISSUE_BATCH])
        if not together:
            self.plan = whole_plan
        dataprep_s = await work(self._generate(), self._prepare(fence), self._train(trainer), together)
        wall_s = time.perf_counter() - started
        done, wired = await counted(store.client)
        report = await audit(store)
        assert report.ok, report.messages
        assert report.outcomes["trained"] == self.groups
        await store.steps.checkpointed(trainer, self.groups // self.prompts_per_step - 1)
        await store.steps.retire()
        left_bytes = await used_bytes(store.client) - before
        await store.restores.delete_run()
        return Times(wall_s, dataprep_s, left_bytes, done - commands, wired - wire_bytes)

    async def _generate(self) -> None:
        """Act like a busy generator: claim ahead, and submit each group when it is done."""
        claimed: asyncio.Queue[Claim] = asyncio.Queue(CONCURRENT)

        async def claim() -> None:
            left = self.groups
            while left:  # a claim returns none during a publication
                _, claims = await self.store.tickets.claim("generator-0", self.published, self.trainer, LEASE_S, CONCURRENT)
                left -= len(claims)
                for one in claims:
                    await claimed.put(one)

        async def finish(share: int) -> None:
            for _ in range(share):
                one = await claimed.get()
                payload = self.payloads[one.fence % len(self.payloads)]
                assert await self.store.tickets.submit("generator-0", one, make_header(one, payload), payload, TTL_S)
                self.headers.set()

        await asyncio.gather(claim(), *(finish(len(range(i, self.groups, CONCURRENT))) for i in range(CONCURRENT)))

    async def _prepare(self, fence: int) -> None:
        """Act like dataprep: settle headers and prepare steps, with its own pure functions."""
        step, steps = 0, self.groups // self.prompts_per_step
        rules = admission.Rules(self.prompts_per_step, 10**6)
        while step < steps:
            self.headers.clear()
            if not (items := await self.store.replay.read_headers(fence, SETTLE_BATCH)):
                await self.headers.wait()
                continue
            settlements = [Settlement(item, "insert", min(item.header.oldest)) for item in items if item.header]
            await self.store.replay.settle(fence, settlements)
            while step < steps:
                sweep_and_peek = await self.store.replay.sweep_and_peek(fence, 0, self.prompts_per_step)
                decision = admission.decide(sweep_and_peek, rules, 0.0)
                if not isinstance(decision, admission.Prepare):
                    break
                plan, ranks = self.plan(step, await self.store.replay.groups(decision.groups))
                await self.store.steps.prepare(fence, plan, ranks, 0, [1.0] * len(decision.groups), decision.gaps_until)
                self.prepared = step
                self.steps.set()
                step += 1

    async def _train(self, fence: int) -> None:
        """Act like two trainer ranks: each reads its plan and fetches its payloads; rank 0 commits and publishes."""
        for step in range(self.groups // self.prompts_per_step):
            while self.prepared < step:
                self.steps.clear()
                await self.steps.wait()
            fetched: set[str] = set()
            for rank in range(RANKS):
                rows = (await self.store.steps.rank_plan(step, rank)).rows
                payloads = await self.store.steps.payloads(sorted({sample.payload for row in rows for sample in row}))
                assert all(len(payload.tokens) == GROUP_SIZE * COMPLETION_TOKENS for payload in payloads.values())
                fetched |= payloads.keys()
            assert len(fetched) == self.prompts_per_step
            await self.store.steps.commit(fence, step)
            await self.store.steps.publish(fence, step + 1)
            self.published = step + 1


async def raw(store: Store, payloads: Sequence[bytes], groups: int) -> float:
    """Return the seconds to SET and then GET as many payloads with plain pipelines."""
    keys = [store.keys.payload(f"raw-{i}") for i in range(groups)]
    pieces = [range(start, min(start + SUBMITTED_TOGETHER, groups)) for start in range(0, groups, SUBMITTED_TOGETHER)]

    async def write(lane: int) -> None:
        for piece in pieces[lane::REQUESTS_UNDER_WAY]:
            async with store.client.pipeline(transaction=False) as pipe:
                for i in piece:
                    pipe.set(keys[i], payloads[i % len(payloads)])
                await pipe.execute()

    async def read(lane: int) -> None:
        for piece in pieces[lane::REQUESTS_UNDER_WAY]:
            async with store.client.pipeline(transaction=False) as pipe:
                for i in piece:
                    pipe.get(keys[i])
                values = await pipe.execute()
            assert all(len(value) == len(payloads[0]) for value in values)

    started = time.perf_counter()
    for side in (write, read):
        await asyncio.gather(*(side(lane) for lane in range(REQUESTS_UNDER_WAY)))
    wall_s = time.perf_counter() - started
    await store.restores.delete_run()
    return wall_s


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Alternate both sides, and report."""
    server = RedisServer(folder, program=options.server)
    server.start()
    payloads = [make_payload(seed) for seed in range(64)]
    size_mb = len(payloads[0]) / 1e6
    names = ("ratio", "groups_per_s", "mb_per_s", "raw_groups_per_s", "dataprep_us_per_group", "calls_per_group",
             "commands_per_group", "wire_over_payload")  # fmt: skip
    samples: dict[str, list[float]] = {name: [] for name in names}
    commands: Counter[str] = Counter()
    try:
        store = await Store.connect(server.url, "datapath", server.password)
        for repeat in range(options.repeats + 1):
            raw_s = await raw(store, payloads, options.groups)
            times = await Ours(store, payloads, options.groups, options.prompts_per_step).run(together=True)
            raw_s = (raw_s + await raw(store, payloads, options.groups)) / 2  # before and after, so drift of the machine cancels
            apart = await Ours(store, payloads, options.groups, options.prompts_per_step).run(together=False)
            if repeat == 0:
                continue  # the first fills caches and memory
            samples["ratio"].append(raw_s / times.wall_s)
            samples["groups_per_s"].append(options.groups / times.wall_s)
            samples["mb_per_s"].append(options.groups * size_mb / times.wall_s)
            samples["raw_groups_per_s"].append(options.groups / raw_s)
            samples["dataprep_us_per_group"].append(apart.dataprep_s / options.groups * 1e6)
            commands = Counter(times.commands)
            samples["calls_per_group"].append(commands["fcall"] / options.groups)
            samples["commands_per_group"].append(commands.total() / options.groups)
            samples["wire_over_payload"].append(times.wire_bytes / options.groups / len(payloads[0]) / 2)
            if not options.json:
                print(f"ours {samples['groups_per_s'][-1]:8.0f} groups/s   raw {samples['raw_groups_per_s'][-1]:8.0f} groups/s")
        await store.close()
    finally:
        server.stop()
    subject = {"groups": options.groups, "payload_bytes": len(payloads[0]), "server": Path(server.program).name}
    shown = {name: round(count / options.groups, 3) for name, count in commands.most_common()}
    report({"benchmark": "datapath", **subject, "commands": shown}, samples)


def main() -> int:
    """Parse the command line and run."""
    return run(measure, whole_steps(group_arguments(__doc__, 2048)))


if __name__ == "__main__":
    sys.exit(main())
