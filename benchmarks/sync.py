"""The cost of a weight-sync round, against a bare broadcast of the same bytes.

    python benchmarks/sync.py --json
    python benchmarks/sync.py --gbit 10 --json

Everything except the model and the engines is real: a server, the trainer's rounds and sender, and one process per generator that
follows the rounds and copies what it receives into its own model. Torch has one thread in every process. Rounds alternate with
broadcasts by `torch.distributed` of the same bytes to the same processes on the same backend (gloo), one bucket-sized buffer at a
time, always into the same memory. Several sets of processes are measured one after another: in some of them a bare broadcast
takes 1.6 to 1.9 times as long for as long as they live, because their threads happen to share cores. For every size and number of
receivers: `round_s`, `bytes_per_s` and `bandwidth_ratio` of a whole round with an existing group, from its opening to the last
acknowledgement (goal: 0.8 of the bare broadcast's), `pause_share`, the longest pause of a generator over the round (goal: at most
0.3), `send_share`, the trainer's part, and `first_s`, a first round with `gather` and `join`. All are with checksums, which the
prefix `verified_` of the names says. The last line is one JSON object; its figures are named `<MB>mb_<receivers>.<figure>`. With
`--gbit`, everything, including the broadcasts, passes a link of that speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # `python benchmarks/sync.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

from benchmarks import link
from benchmarks.common import arguments, bare_run, report, run
from services.config import RunConfig, load, to_toml
from services.console.run.redis_server import RedisServer
from services.generator.metrics import GeneratorMetrics
from services.http.entry import open_service
from services.runtime import logs
from services.runtime.loops import Loop
from services.runtime.notifications import Notifications
from services.runtime.portal import Portal
from services.runtime.process_tools import free_port
from services.store import Store
from services.weights.broadcast.host_memory import lay_end_to_end
from services.weights.broadcast.sender import BroadcastSender
from services.weights.buckets import BUCKET_BYTES
from services.weights.rounds.leader import Send, SyncRounds
from services.weights.rounds.member import WeightFollower
from tests.support.scripted import ScriptedEngine
from tests.support.senders import sender_of

WIDTH = 1024  # of the model's square matrices: 2 MiB each


class TimedEngine(ScriptedEngine):
    """Copies what it received into its own model during the pause, and prints how long each pause was."""

    async def pause(self) -> None:
        self._since = time.monotonic()
        await super().pause()

    async def receive(self, version: int) -> None:
        assert self.staged is not None
        await asyncio.to_thread(self._load, self.staged)
        self.staged, self.version = None, version

    def _load(self, staged: dict[str, torch.Tensor]) -> None:
        if not self.weights:
            self.weights = {name: torch.zeros_like(weight) for name, weight in staged.items()}
        for name, weight in staged.items():
            self.weights[name].copy_(weight)

    async def resume(self) -> None:
        await super().resume()
        print(json.dumps({"version": self.version, "pause_s": time.monotonic() - self._since}), flush=True)


async def follow(config: RunConfig, name: str) -> None:
    """Run a generator that only follows rounds, and takes part in a bare broadcast for each line on standard input."""
    torch.set_num_threads(1)
    logs.configure(config.run.name, name)  # to standard error, since the pauses go to standard output
    engine = TimedEngine()
    await engine.start(config)
    async with open_service("generator", config, name) as service:

        async def work(loop: Loop) -> None:
            loop.limit_s = float("inf")
            await service.created()
            service.say(phase="unsynced", world=engine.world)
            await asyncio.to_thread(_bare_receiver)

        service.add_loop("weights", WeightFollower(service, engine, GeneratorMetrics(service.registry)).follow)
        await service.run(work)


def _bare_receiver() -> None:
    given = json.loads(sys.stdin.readline())
    dist.init_process_group("gloo", **given)
    buffers: dict[int, torch.Tensor] = {}
    while line := sys.stdin.readline():
        _bare(json.loads(line), buffers)
    dist.destroy_process_group()


def _bare(sizes: list[int], buffers: dict[int, torch.Tensor]) -> None:
    """Broadcast buffers of these sizes in bytes; return when every process has them all."""
    for i, nbytes in enumerate(sizes):
        if i not in buffers:
            buffers[i] = torch.zeros(nbytes, dtype=torch.uint8)
        dist.broadcast(buffers[i], 0)
    dist.barrier()


class Receivers:
    """Processes that run this file and follow the rounds."""

    def __init__(self, config: RunConfig, folder: Path, count: int) -> None:
        (folder / "resolved.toml").write_text(to_toml(config))
        command = [sys.executable, __file__, "--config", str(folder / "resolved.toml"), "--member"]
        with (folder / "members.log").open("ab") as log:
            self.processes = [
                subprocess.Popen(
                    [*command, f"generator-{i}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
                for i in range(count)
            ]

    def write(self, line: Callable[[int], Any]) -> None:
        """Write a line to each process."""
        for i, process in enumerate(self.processes):
            assert process.stdin is not None
            process.stdin.write(json.dumps(line(i)) + "\n")
            process.stdin.flush()

    def pauses(self, version: int) -> list[float]:
        """Return how long each process was paused for `version`, in seconds."""
        lines = []
        for process in self.processes:
            assert process.stdout is not None
            lines.append(json.loads(process.stdout.readline()))
        assert {line["version"] for line in lines} == {version}
        return [line["pause_s"] for line in lines]

    def end(self) -> None:
        """Let the processes exit, and kill any that do not."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def trainer_side(config: RunConfig) -> Iterator[tuple[Portal, Store, Callable[..., SyncRounds]]]:
    """Create a run without a trainer; yield portal, store, and a function that makes rounds for a sender and its send call."""
    portal = Portal()
    store = portal.call(Store.connect(config.redis.url, config.run.name, Path(config.redis.password_file).read_text()))
    portal.call(store.run.create("config", "data", config.run.steps, config.slots))
    fence = portal.call(store.run.attach_trainer())
    notifications = Notifications()
    listening = portal.start(notifications.listen(store))

    def rounds(sender: BroadcastSender, send: Send) -> SyncRounds:
        service: Any = SimpleNamespace(config=config, store=store, notifications=notifications)
        return SyncRounds(service, portal, fence, sender, send, lambda: None)

    try:
        yield portal, store, rounds
    finally:

        async def end() -> None:
            listening.cancel()
            await asyncio.sleep(0)
            await store.restores.delete_run()
            await store.close()

        portal.call(end())
        portal.close()


def measure_one(
    config: RunConfig, folder: Path, megabytes: int, count: int, repeats: int, bucket_bytes: int
) -> dict[str, list[float]]:
    """Return the figures of rounds that send `megabytes` of weights to `count` receivers."""
    torch.set_num_threads(1)  # contention between processes that each use all cores is not measured here
    layers = max(1, round(megabytes * 1e6 / (2 * WIDTH * (WIDTH + 1))))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(layers)))
    lay_end_to_end(model)
    with trainer_side(config) as (portal, store, rounds):
        receivers = Receivers(config, folder, count)
        try:
            address = f"tcp://127.0.0.1:{free_port()}"
            receivers.write(lambda i: {"init_method": address, "world_size": count + 1, "rank": i + 1})
            dist.init_process_group("gloo", init_method=address, world_size=count + 1, rank=0)
            while len(portal.call(store.fleet.members(config.fleet.ttl_s))) < count:
                time.sleep(0.05)
            sender = sender_of(config, model, bucket_bytes=bucket_bytes)
            assert isinstance(sender, BroadcastSender)
            try:
                return {f"verified_{name}": values for name, values in _rounds(rounds, sender, receivers, repeats).items()}
            finally:
                sender.close()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            receivers.end()


def _rounds(
    rounds: Callable[..., SyncRounds], sender: BroadcastSender, receivers: Receivers, repeats: int
) -> dict[str, list[float]]:
    """Return the figures of a group's rounds, alternating with bare broadcasts."""
    sizes = [bucket.nbytes for bucket in sender.manifest.buckets]
    buffers: dict[int, torch.Tensor] = {}
    spent: list[float] = []

    def send(version: int, fence: int, damaged: bool) -> None:
        started = time.perf_counter()
        sender.send(version, fence, damaged)
        spent.append(time.perf_counter() - started)

    count, standing = len(receivers.processes), rounds(sender, send)
    first = standing.run(0)
    assert len(first.members) == count
    receivers.pauses(0)
    figures: dict[str, list[float]] = {"first_s": [first.total_s]}
    for repeat in range(repeats + 1):
        version = repeat + 1
        receivers.write(lambda _: sizes)
        started = time.perf_counter()
        _bare(sizes, buffers)
        bare_s = time.perf_counter() - started
        took = standing.run(version)
        assert (len(took.members), took.attempts) == (count, 1), took
        longest = max(receivers.pauses(version))
        if repeat == 0:  # the first of each allocates memory
            continue
        for name, value in {
            "round_s": took.total_s,
            "bytes_per_s": sender.manifest.nbytes / took.total_s,
            "bandwidth_ratio": bare_s / took.total_s,
            "bare_bytes_per_s": sender.manifest.nbytes / bare_s,
            "pause_share": longest / took.total_s,
            "pause_s": longest,
            "send_share": spent[-1] / took.total_s,
        }.items():
            figures.setdefault(name, []).append(value)
    return figures


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure every size with every number of receivers, and report."""
    server = RedisServer(folder)
    server.start()
    samples: dict[str, list[float]] = {}
    try:
        config = bare_run(folder, server, "run.name=sync", "sync.backend=gloo", "sync.host=127.0.0.1")
        for megabytes in options.megabytes:
            for count in options.receivers:
                for _ in range(options.sets):
                    found = await asyncio.to_thread(
                        measure_one, config, folder, megabytes, count, options.repeats, options.bucket_mib << 20
                    )
                    for name, values in found.items():
                        samples.setdefault(f"{megabytes}mb_{count}.{name}", []).extend(values)
                    if not options.json:
                        shown = ", ".join(f"{name} {sorted(values)[len(values) // 2]:.3g}" for name, values in found.items())
                        print(f"{megabytes} MB to {count}: {shown}", flush=True)
    finally:
        server.stop()
    subject = {"benchmark": "sync", "threads": torch.get_num_threads(), "bucket_mib": options.bucket_mib, "gbit": options.gbit}
    report(subject, samples)


def main() -> int:
    """Parse the command line and measure; with `--member`, run a receiver."""
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100], help="sizes of the weights")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4], help="numbers of receiving processes")
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_BYTES >> 20, help="size of the buckets")
    parser.add_argument("--sets", type=int, default=3, help="sets of receiving processes")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each set")
    parser.add_argument("--gbit", type=float, default=0.0, help="speed of the link in Gbit/s; 0: plain loopback")
    parser.add_argument("--member", default="", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        asyncio.run(follow(load(options.config, [], environ=dict(os.environ)), options.member))
        return 0
    if options.gbit:
        link.enter(options.gbit)
    return run(measure, options)


if __name__ == "__main__":
    sys.exit(main())
