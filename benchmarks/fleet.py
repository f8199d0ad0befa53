"""The cost of a large fleet on its one Redis, and where it stops scaling.

    python benchmarks/fleet.py --json

Generators are simulated, many in one process, and do what a real one does: each second a heartbeat and a read of the run and the
round, notifications, the real follower of rounds, claims and submissions. Their engine has no model and transfers nothing, so a
round consists of its phases and acknowledgements alone. For every size of the fleet:
- `idle_cpu`, the server's CPU seconds per second with heartbeats and reads only, and `idle_beats`, the share of due heartbeats
  that were sent (below 1 the machine, not Redis, is the limit; `idle_cpu_full` is the CPU that the full rate would take);
- `claim_p50_ms`, `claim_p99_ms`, latency of a claim that gets a ticket, as generators see it, while `tickets_per_s` are issued,
  claimed and submitted; `ticket_cpu_us`, the server's CPU per ticket; `ping_p99_ms`, latency of another client meanwhile;
- `first_round_s`, a round with gather and join; `round_s`, one with an existing group; `round_cpu_s`, the server's CPU for it.
The last line is one JSON object; its figures are named `<generators>.<figure>`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # `python benchmarks/fleet.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, bare_run, report, run
from benchmarks.datapath import make_header, make_tickets
from services.config import RunConfig, load, to_toml
from services.console.run.redis_server import RedisServer
from services.generator.engines.base import Engine
from services.generator.metrics import GeneratorMetrics
from services.http.credentials import redis_password
from services.protocol.messages import PodStatus, Round
from services.runtime.loops import end_tasks
from services.runtime.notifications import Notifications
from services.runtime.portal import Portal
from services.runtime.service import Service
from services.store import Store
from services.weights.rounds.leader import SyncRounds
from services.weights.rounds.member import WeightFollower
from services.weights.transport import Sender

PROCESSES = 2
CONNECTED_TOGETHER = 25
SETTLE_S = 3.0  # between the start of a fleet and the first measurement
PAYLOAD = bytes(2000)
BURST_S = 0.5  # between two batches of tickets


def served_s(pid: int) -> float:
    """Return the CPU seconds of the server's main thread, in nanoseconds; /proc/PID/stat only counts hundredths."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


class NoEngine:
    """An engine that takes part in rounds but receives nothing."""

    version, whole, world, stages, fetched_bytes = -1, True, 1, True, 0

    async def join(self, round: Round, first_rank: int) -> None:
        """Do nothing: there is no group."""

    async def stage(self, version: int, limit_s: float | None = None) -> None:
        """Do nothing: there are no weights."""

    async def receive(self, version: int) -> None:
        self.version = version

    async def pause(self) -> None:
        """Do nothing: nothing runs."""

    async def resume(self) -> None:
        """Do nothing: nothing runs."""


class NoTransfer(Sender):
    """A sender without weights."""

    backend = "none"

    def __init__(self) -> None:
        """Have nothing to send."""

    def open(self, fence: int) -> tuple[str, int]:
        """Return an address that nobody needs."""
        return "", 0

    def send(self, version: int, fence: int, damaged: bool = False) -> None:
        """Send nothing."""


class Generator:
    """One simulated generator."""

    def __init__(self, config: RunConfig, store: Store, name: str) -> None:
        status = PodStatus("generator", name, "boot", "here", 1, "", "unsynced", -1, 1, {"tokens_per_s": 1.0, "running": 1.0})
        self.service, self.waits, self.beats = Service("generator", config, store, status), list[float](), 0
        engine: Engine = NoEngine()  # type: ignore[assignment]  # the weight follower needs no more
        self._follower = WeightFollower(self.service, engine, GeneratorMetrics(self.service.registry))
        self._engine = engine

    def start(self) -> list[asyncio.Task[None]]:
        """Start its loops, which run until they are cancelled."""
        service = self.service
        bodies = (service._listen, self._beat, service.view.follow, self._follower.follow, self._claim)
        return [asyncio.create_task(service.add_loop(body.__name__, body).supervise()) for body in bodies]

    async def _beat(self, loop: Any) -> None:
        while True:
            await self.service.store.fleet.beat(self.service.status, self.service.config.fleet.ttl_s)
            self.beats += 1
            loop.progress()
            await self.service.notifications.wait("heartbeat", timeout=self.service.config.fleet.heartbeat_s)

    async def _claim(self, loop: Any) -> None:
        service, scan, name = self.service, "0-0", self.service.status.name
        while True:
            loop.progress()
            state = service.view.state
            if state is not None and self._engine.version == state.published_version >= 0:
                began = time.perf_counter()
                scan, claims = await service.store.tickets.claim(
                    name, self._engine.version, service.status.trainer_fence, 600.0, 1, scan
                )
                for claim in claims:
                    self.waits.append(time.perf_counter() - began)
                    await service.store.tickets.submit(name, claim, make_header(claim, PAYLOAD), PAYLOAD, 600)
                if claims:
                    continue
            await service.notifications.wait("tickets", "version", "control", timeout=1.0)


async def follow(config: RunConfig, first: int, count: int) -> None:
    """Run the generators of one process; print their counts for each line on standard input."""
    password = redis_password(config)
    generators, tasks, stores = list[Generator](), list[asyncio.Task[None]](), list[Store]()
    for start in range(first, first + count, CONNECTED_TOGETHER):
        names = [f"generator-{i}" for i in range(start, min(start + CONNECTED_TOGETHER, first + count))]
        connected = await asyncio.gather(*(Store.connect(config.redis.url, config.run.name, password) for _ in names))
        for name, store in zip(names, connected, strict=True):
            stores.append(store)
            generators.append(Generator(config, store, name))
            tasks += generators[-1].start()
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        waits = [wait for generator in generators for wait in generator.waits]
        print(json.dumps({"beats": sum(generator.beats for generator in generators), "waits": waits}), flush=True)
        for generator in generators:
            generator.waits.clear()
    await end_tasks(tasks)
    for store in stores:
        await store.close()


class Fleet:
    """The processes of the generators."""

    def __init__(self, config: RunConfig, folder: Path, count: int) -> None:
        (folder / "resolved.toml").write_text(to_toml(config))
        share = -(-count // PROCESSES)
        ranges = [(first, min(share, count - first)) for first in range(0, count, share)]
        with (folder / "generators.log").open("ab") as log:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, __file__, "--config", str(folder / "resolved.toml"), "--of", str(first), str(size)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                )
                for first, size in ranges
            ]  # fmt: skip

    def counts(self) -> tuple[int, list[float]]:
        """Return the heartbeats so far, and how long each claim since the last call took."""
        beats, waits = 0, []
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("count\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            while not line.startswith("{"):  # libraries print to the same pipe
                assert line, "generators exited: see generators.log"
                line = process.stdout.readline()
            counts = json.loads(line)
            beats, waits = beats + counts["beats"], waits + counts["waits"]
        return beats, waits

    def end(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def opened(config: RunConfig, slots: int) -> Iterator[tuple[Portal, Store, SyncRounds, int, int]]:
    """Create a run; yield portal, store, its trainer's rounds, and the fences of trainer and dataprep."""
    portal = Portal()
    store = portal.call(Store.connect(config.redis.url, config.run.name, Path(config.redis.password_file).read_text()))
    portal.call(store.run.create("config", "data", config.run.steps, slots))
    fence, leader = portal.call(store.run.attach_trainer()), portal.call(store.run.lead("dataprep-0", 3600.0))
    assert leader is not None
    notifications = Notifications()
    listening = portal.start(notifications.listen(store))
    try:
        sender = NoTransfer()
        service: Any = SimpleNamespace(config=config, store=store, notifications=notifications)
        yield (
            portal,
            store,
            SyncRounds(service, portal, fence, sender, sender.send, lambda: None),
            fence,
            leader,
        )
    finally:

        async def end() -> None:
            listening.cancel()
            await asyncio.sleep(0)
            await store.close()

        portal.call(end())
        portal.close()


async def issue(store: Store, fence: int, per_s: int, seconds: float) -> list[float]:
    """Issue tickets in bursts; return how long each PING of another client takes meanwhile."""
    tickets, pings, cursor = make_tickets(int(per_s * seconds) + per_s), list[float](), 0
    burst, began = max(1, int(per_s * BURST_S)), time.monotonic()
    while time.monotonic() - began < seconds:
        cursor += await store.tickets.issue(fence, cursor, tickets[cursor : cursor + burst])
        over = began + cursor / per_s
        while time.monotonic() < over:
            asked = time.perf_counter()
            await store.client.ping()
            pings.append(time.perf_counter() - asked)
            await asyncio.sleep(0.01)
    return pings


def measure_one(folder: Path, options: argparse.Namespace, count: int) -> dict[str, list[float]]:
    """Return the figures of a fleet of `count` generators with its own server."""
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    slots = int(options.tickets_per_s * (options.seconds + 2))
    config = bare_run(
        folder, server, "run.name=fleet", f"admission.prompts_per_step={slots}", "sync.backend=gloo", "sync.deadline_s=120",
        "fleet.ttl_s=60",
    )  # fmt: skip
    fleet = None
    try:
        with opened(config, slots) as (portal, store, rounds, fence, leader):
            fleet = Fleet(config, folder, count)
            while len(portal.call(store.fleet.members(60))) < count:
                time.sleep(0.5)
            time.sleep(SETTLE_S)
            (beats, _), used, began = fleet.counts(), served_s(server.pid), time.monotonic()
            time.sleep(options.seconds)
            after, _ = fleet.counts()
            spent_s, beaten = time.monotonic() - began, (after - beats) / count
            idle_cpu, idle_beats = (served_s(server.pid) - used) / spent_s, beaten / spent_s * config.fleet.heartbeat_s
            first = rounds.run(0)
            assert len(first.members) == count
            portal.call(store.steps.publish(fence, 0))
            time.sleep(SETTLE_S)
            fleet.counts()
            used, began = served_s(server.pid), time.monotonic()
            pings = portal.call(issue(store, leader, options.tickets_per_s, options.seconds))
            spent_s, served = time.monotonic() - began, served_s(server.pid) - used
            _, waits = fleet.counts()
            claims = quantiles(waits, n=100)
            spent, took = list[float](), list[float]()
            for version in range(1, options.rounds + 1):
                used = served_s(server.pid)
                report_of = rounds.run(version)
                assert (len(report_of.members), report_of.attempts) == (count, 1), report_of
                spent.append(served_s(server.pid) - used)
                took.append(report_of.total_s)
        return {
            "idle_cpu": [idle_cpu], "idle_beats": [idle_beats], "idle_cpu_full": [idle_cpu / idle_beats],
            "claim_p50_ms": [1000 * claims[49]], "claim_p99_ms": [1000 * claims[98]],
            "ping_p99_ms": [1000 * quantiles(pings, n=100)[98]], "tickets_per_s": [len(waits) / spent_s],
            "ticket_cpu_us": [1e6 * max(0.0, served - idle_cpu * spent_s) / len(waits)],
            "first_round_s": [first.total_s], "round_s": took, "round_cpu_s": spent,
        }  # fmt: skip
    finally:
        if fleet is not None:
            fleet.end()
        server.stop()


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure one size after another, and report."""
    samples: dict[str, list[float]] = {}
    for count in options.generators:
        found = await asyncio.to_thread(measure_one, folder / str(count), options, count)
        samples |= {f"{count}.{name}": values for name, values in found.items()}
        if not options.json:
            shown = ", ".join(f"{name} {sorted(values)[len(values) // 2]:.3g}" for name, values in found.items())
            print(f"{count} generators: {shown}", flush=True)
    report({"benchmark": "fleet", "processes": PROCESSES}, samples)


def main() -> int:
    """Parse the command line and measure; with `--of`, run the generators of one process."""
    parser = arguments(__doc__)
    parser.add_argument("--generators", type=int, nargs="+", default=[10, 100, 300, 1000], help="sizes of the fleet")
    parser.add_argument("--tickets-per-s", type=int, default=100, help="tickets issued per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="rounds with an existing group")
    parser.add_argument("--of", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of:
        asyncio.run(follow(load(options.config, [], environ=dict(os.environ)), *options.of))
        return 0
    return run(measure, options)


if __name__ == "__main__":
    sys.exit(main())
