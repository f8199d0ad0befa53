"""How cost grows with the fleet, the table and the trainer's ranks: exponents of power laws.

    python benchmarks/growth.py --json

One of these three grows while everything else stays the same, and each cost is measured at every size. `<what>_exponent` is the b
of cost ~ size^b, by least squares over the logarithms; its spread is two standard errors to either side (fitting.py). At 0, the
cost does not depend on the size; at 1, it is proportional to it. `<what>_growth` is the cost at the largest size over that at the
smallest, with the smallest and the largest value that the samples allow.
- `fleet.*`: the server's CPU for a ticket (`fleet.ticket`) and for a round without weights (`fleet.round`), by simulated
  generators (see benchmarks/fleet.py, whose figures are included).
- `table.*`: the server's time to settle a group (`table.settle`) and to draw one of a step of 64 (`table.draw`, by
  `sweep_and_peek` and `prepare`), by number of groups in a prioritised table. Headers are small; there are no payloads and no
  append-only file.
  `longest_function_ms` is the longest call of a function at 100,000 groups (or at the largest size, if that is smaller), while
  light and heavy groups are drawn alternately and all weights are rescaled.
- `ranks.plan`: seconds that dataprep takes to plan a step of 4,096 completions, by number of ranks.
The last line is one JSON object; `curves` has the fitted costs, each over that at the smallest size.
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
from benchmarks.fleet import measure_one
from benchmarks.suite.fitting import growth, power_law, relative
from services.console.run.redis_server import RedisServer
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
DRAWS = 10  # steps per measurement
COMPLETIONS, ROW_TOKENS = 4096, 8192
LONGEST, LONGEST_AT = "table.longest", 100_000  # groups in the table when the longest function is measured
Costs = dict[int, list[float]]
"""Size -> measurements at that size."""


class Table:
    """A prioritised table that grows."""

    def __init__(self, store: Store, sizes: Sequence[int]) -> None:
        self.store, self.sizes, self.largest, self.size, self._step = store, sizes, max(sizes), 0, 0
        self._rng = np.random.default_rng(0)

    async def open(self) -> None:
        """Create an empty table with room for all groups."""
        room = self.largest + 2 * WINDOWS * (len(self.sizes) + 1) * SETTLED_TOGETHER
        await self.store.client.config_set("appendonly", "no")  # the file of a million groups would fill disks
        await self.store.run.create("growth", "growth", 1, room, TableRules("prioritized", "fifo", room, 0))
        fence = await self.store.run.lead("growth", 3600)
        assert fence is not None
        self.fence = fence

    async def grow(self, size: int) -> None:
        """Settle groups until the table holds `size`."""
        while self.size < size:
            count = min(WRITTEN_TOGETHER, size - self.size)
            await self._submitted(count)
            for start in range(0, count, SETTLED_TOGETHER):
                await self._settle(min(SETTLED_TOGETHER, count - start))

    async def settle_us(self) -> list[float]:
        """Return the server's microseconds to settle a group, for each window."""
        return [await self._window() for _ in range(WINDOWS)]

    async def draw_us(self) -> list[float]:
        """Return the server's microseconds to draw a group, for each window."""
        found = []
        for _ in range(WINDOWS):
            before = await self._served_us()
            for _ in range(DRAWS):
                await self._draw()
            found.append((await self._served_us() - before) / DRAWS / STEP)
        return found

    async def longest_ms(self) -> list[float]:
        """Return the milliseconds of the longest function while light and heavy groups are drawn alternately, all weights are
        rescaled once, and one batch is settled. A function counts with the 99th percentile of its calls in its best window: a
        stall of its own shows in every window, other load on the machine only in some.
        """
        client, replay = self.store.client, self.store.replay
        await client.config_set("slowlog-log-slower-than", 0)
        await client.config_set("slowlog-max-len", 100_000)
        least, trainer = dict[bytes, float](), await self.store.run.attach_trainer()
        for window in range(WINDOWS):
            await self._submitted(SETTLED_TOGETHER)
            await client.slowlog_reset()
            for _ in range(DRAWS):
                heavy, *light = await self._draw()
                await replay.reweigh(trainer, {heavy: 1e9} | dict.fromkeys(light, 1e-9))
            await replay.rescale(self.fence, window, window + 1, 2.0 ** (16 if window % 2 else -16))
            await self._settle(SETTLED_TOGETHER)
            entries = await client.slowlog_get(100_000)
            taken: dict[bytes, list[float]] = {}
            for entry in entries:
                command, _, rest = entry["command"].partition(b" ")
                if command == b"FCALL":
                    taken.setdefault(rest.partition(b" ")[0], []).append(entry["duration"] / 1000)
            for name, of in taken.items():
                longest_ms = sorted(of)[int(0.99 * (len(of) - 1))]
                least[name] = min(longest_ms, least.get(name, longest_ms))
        await client.config_set("slowlog-log-slower-than", -1)
        return [max(least.values())]

    async def _draw(self) -> list[str]:
        """Prepare a step; return its groups."""
        groups = [group for group, _ in (await self.store.replay.sweep_and_peek(self.fence, 0, STEP)).first]
        assert len(groups) == STEP
        plan = StepPlan(self._step, groups, [], 1, 0, [0], [1.0], 0, 0, {})
        variates = self._rng.standard_exponential(STEP).tolist()
        await self.store.steps.prepare(self.fence, plan, [RankPlan([])], 0, variates)
        self._step += 1
        return groups

    async def _window(self) -> float:
        await self._submitted(SETTLED_TOGETHER)
        before = await self._served_us()
        await self._settle(SETTLED_TOGETHER)
        return (await self._served_us() - before) / SETTLED_TOGETHER

    async def _served_us(self) -> float:
        """Return the microseconds that the server has spent in functions."""
        return float((await self.store.client.info("commandstats"))["cmdstat_fcall"]["usec"])

    async def _submitted(self, count: int) -> None:
        """Write headers and outstanding tickets, as submissions leave them."""
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
    """Return the costs by size of the table, which grows from one size to the next."""
    server = RedisServer(folder / "table")
    server.start()
    store = await Store.connect(server.url, "growth", server.password)
    found: dict[str, Costs] = {"table.settle": {}, "table.draw": {}, LONGEST: {}}
    try:
        growing = Table(store, sizes)
        await growing.open()
        for size in sorted(sizes):
            await growing.grow(size)
            found["table.draw"][size] = await growing.draw_us()
            found["table.settle"][size] = await growing.settle_us()
            if size == LONGEST_AT or size == max(sizes) < LONGEST_AT:
                found[LONGEST][size] = await growing.longest_ms()
    finally:
        await store.close()
        server.kill()  # a clean shutdown would first write everything to disk
    return found


def ranks(counts: Sequence[int], repeats: int) -> dict[str, Costs]:
    """Return the seconds to plan the same step, by number of ranks."""
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
    """Measure ranks, table and fleet, and report."""
    samples: dict[str, list[float]] = {}
    costs = ranks(options.ranks, 5)
    costs |= await table(folder, options.groups)
    ((_, samples["longest_function_ms"]),) = costs.pop(LONGEST).items()
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
    parser.add_argument("--tickets-per-s", type=int, default=100, help="tickets issued per second in a fleet")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of a measurement of a fleet")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a fleet with an existing group")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
