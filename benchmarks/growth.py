"""How cost grows with the fleet, with the table and with the trainer's ranks: exponents of power laws.

    python benchmarks/growth.py --json

Three things are made larger, everything else stays; each cost is taken at every size, and `<what>_exponent` is the b of cost ~
size^b, by least squares over the logarithms, with two standard errors to either side as its spread (fitting.py). 0: the size
costs nothing; 1: it costs in proportion. `<what>_growth` is the cost at the largest size over that at the smallest, with the
least and the most that it can be by the samples.
- `fleet.*`: the server's CPU for a ticket, `fleet.ticket`, and for a round without weights, `fleet.round`, with so many
  simulated generators (benchmarks/fleet.py says what they do; its figures are here too).
- `table.*`: the server's time for a group that is settled, `table.settle`, and for one of a step of 64 that is drawn (by
  `sweep_and_peek` and `prepare`), `table.draw`, with so many groups in a prioritised table. Headers are
  small, there are no payloads and no append-only file.
- `ranks.plan`: seconds that dataprep takes to plan a step of 4,096 completions for so many ranks.
The last line is one JSON object; `curves` has the costs that were fitted, each over that at the smallest size.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # `python benchmarks/growth.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report, run
from benchmarks.fitting import growth, power_law, relative
from benchmarks.fleet import measure_one
from services.console.local.redis_server import RedisServer
from services.dataprep.planning.plan import Layout, PlanGroup, plan_step
from services.protocol import codec
from services.protocol.messages import Header, RankPlan, StepPlan
from services.store import Settlement, Store
from services.store.records import TableRules

GROUP_SIZE = 4
SETTLED_TOGETHER = 256  # as in services/dataprep/loop.py
WRITTEN_TOGETHER = 2048
STEP = 64
WINDOWS = 5  # measurements at each size of the table
DRAWS = 10  # steps of a measurement
COMPLETIONS, ROW_TOKENS = 4096, 8192
Costs = dict[int, list[float]]
"""Size -> what was measured there."""


class Table:
    """A prioritised table that grows."""

    def __init__(self, store: Store, largest: int) -> None:
        self.store, self.largest, self.size, self._step = store, largest, 0, 0
        self._rng = np.random.default_rng(0)

    async def open(self) -> None:
        """An empty table with room for all."""
        room = self.largest + WINDOWS * SETTLED_TOGETHER
        await self.store.client.config_set("appendonly", "no")  # the file of a million groups would fill disks
        await self.store.run.create("growth", "growth", 1, room, TableRules("prioritized", "fifo", room, 0))
        fence = await self.store.run.lead("growth", 3600)
        assert fence is not None
        self.fence = fence

    async def grow(self, size: int) -> None:
        """Settle groups until there are so many."""
        while self.size < size:
            count = min(WRITTEN_TOGETHER, size - self.size)
            await self._submitted(count)
            for start in range(0, count, SETTLED_TOGETHER):
                await self._settle(min(SETTLED_TOGETHER, count - start))

    async def settle_us(self) -> list[float]:
        """Server's microseconds for a group, of each window."""
        return [await self._window() for _ in range(WINDOWS)]

    async def draw_us(self) -> list[float]:
        """Server's microseconds for a group of a step, of each window."""
        found = []
        for _ in range(WINDOWS):
            before = await self._served_us()
            for _ in range(DRAWS):
                sweep_and_peek = await self.store.replay.sweep_and_peek(self.fence, 0, STEP)
                groups = [group for group, _ in sweep_and_peek.first]
                assert len(groups) == STEP
                plan = StepPlan(self._step, groups, [], 1, 0, [0], [1.0], 0, 0, {})
                variates = self._rng.standard_exponential(STEP).tolist()
                await self.store.steps.prepare(self.fence, plan, [RankPlan([])], 0, variates)
                self._step += 1
            found.append((await self._served_us() - before) / DRAWS / STEP)
        return found

    async def _window(self) -> float:
        await self._submitted(SETTLED_TOGETHER)
        before = await self._served_us()
        await self._settle(SETTLED_TOGETHER)
        return (await self._served_us() - before) / SETTLED_TOGETHER

    async def _served_us(self) -> float:
        """Time the server has spent in functions."""
        return float((await self.store.client.info("commandstats"))["cmdstat_fcall"]["usec"])

    async def _submitted(self, count: int) -> None:
        """Headers in the stream and their tickets outstanding, as submissions leave them."""
        keys, rewards, zeros = self.store.keys, [1.0] + [0.0] * (GROUP_SIZE - 1), [0] * GROUP_SIZE
        async with self.store.client.pipeline(transaction=False) as pipe:
            for seq in range(self.size, self.size + count):
                name = f"0-{seq}"
                header = Header(
                    name, seq, 0, seq, f"{name}.1", 0, 60, [300] * GROUP_SIZE, rewards, {"math": rewards}, [False] * GROUP_SIZE,
                    zeros, zeros, "generator-0", 1.0, 0.1, "main", zeros,
                )  # fmt: skip
                pipe.xadd(keys.headers, {"ticket": name, "payload": header.payload, "body": codec.encode(header)})
                pipe.zadd(keys.outstanding, {name: seq})
            await pipe.execute()

    async def _settle(self, count: int) -> None:
        items = await self.store.replay.read_headers(self.fence, count)
        weights, variates = 0.5 + self._rng.random(len(items)), self._rng.standard_exponential(len(items))
        settlements = [
            Settlement(item, "insert", 0, weight, variate)
            for item, weight, variate in zip(items, weights.tolist(), variates.tolist(), strict=True)
        ]
        settled = await self.store.replay.settle(self.fence, settlements)
        assert settled == count, f"{settled} of {count} were settled"
        self.size += settled


async def table(folder: Path, sizes: Sequence[int]) -> dict[str, Costs]:
    """Costs by the size of the table, which grows from one to the next."""
    server = RedisServer(folder / "table")
    server.start()
    store = await Store.connect(server.url, "growth", server.password)
    found: dict[str, Costs] = {"table.settle": {}, "table.draw": {}}
    try:
        growing = Table(store, max(sizes))
        await growing.open()
        for size in sorted(sizes):
            await growing.grow(size)
            found["table.draw"][size] = await growing.draw_us()
            found["table.settle"][size] = await growing.settle_us()
    finally:
        await store.close()
        server.kill()  # nothing of it is wanted, and in order it would write a file of all
    return found


def ranks(counts: Sequence[int], repeats: int) -> dict[str, Costs]:
    """Seconds to plan one and the same step for so many ranks."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(600), 0.8, (COMPLETIONS // 16, 16)), 1, 3000).astype(int)
    groups = [
        PlanGroup(f"0-{i}", f"0-{i}.1", 100, of, np.linspace(-1, 1, 16), np.ones(16, bool), np.zeros(16, int))
        for i, of in enumerate(lengths)
    ]
    found: Costs = {}
    plan_step(0, groups, Layout(1, ROW_TOKENS))  # the first fills caches
    for _ in range(repeats):
        for count in counts:
            started = time.perf_counter()
            plan_step(0, groups, Layout(count, ROW_TOKENS))
            found.setdefault(count, []).append(time.perf_counter() - started)
    return {"ranks.plan": found}


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """One after the other."""
    samples: dict[str, list[float]] = {}
    costs = ranks(options.ranks, 5)
    costs |= await table(folder, options.groups)
    tickets, rounds = Costs(), Costs()
    for count in options.generators:
        found = await asyncio.to_thread(measure_one, folder / str(count), options, count)
        tickets[count], rounds[count] = found["ticket_cpu_us"], found["round_cpu_s"]
        samples |= {f"{count}.{name}": values for name, values in found.items()}
    costs |= {"fleet.ticket": tickets, "fleet.round": rounds}
    for name, of in costs.items():
        samples |= {f"{name}_exponent": power_law(of), f"{name}_growth": growth(of)}
        if not options.json:
            shown = ", ".join(f"{size}: {statistics.median(found):.4g}" for size, found in of.items())
            print(f"{name} {shown}; exponent {samples[f'{name}_exponent'][1]:.2f}", flush=True)
    report({"benchmark": "growth", "curves": {name: relative(of) for name, of in costs.items()}}, samples)


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--generators", type=int, nargs="+", default=[1, 10, 100, 1000], help="sizes of the fleet")
    parser.add_argument("--groups", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000], help="sizes of the table")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="ranks to plan for")
    parser.add_argument("--tickets-per-s", type=int, default=100, help="of a fleet: issued, claimed and submitted")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a measurement of a fleet")
    parser.add_argument("--rounds", type=int, default=3, help="of a fleet with a group that stands")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
