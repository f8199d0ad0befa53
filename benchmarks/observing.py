"""The cost of monitoring a run: its metrics, a scrape of them, tracing on or off, a tracker that hangs.

    python benchmarks/observing.py --json

`group_us` is the time of all counters of a group on its way through generator and dataprep; `trace_off_us` and `trace_on_us` are
that of its seven spans without and with tracing; `scrape_ms` is one scrape of a generator's metrics, which happens every 10 s or
less often. `record_ms` is the time to write a step's metrics to Redis, which is all that a trainer does for trackers. It is
measured alternately without a tracker and with one whose server accepts connections but never answers:
`hung_share_of_a_second` is the difference over a step of one second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":  # `python benchmarks/observing.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from prometheus_client import CollectorRegistry

from benchmarks.common import arguments, configured, report, run
from services.config import RunConfig, digest, to_toml
from services.console.run.redis_server import RedisServer
from services.dataprep.metrics import DataprepMetrics
from services.generator.metrics import GeneratorMetrics
from services.protocol.messages import Header
from services.runtime.metrics import exposition
from services.runtime.tracing import OtlpTracing, TraceRecorder
from services.store import Store

ROUNDS = 2000
SPANS = ("claim", "generate", "verify", "submit", "settle", "plan", "train")
RECORDS = 200  # steps recorded in each half of a pair
FIELDS = 80  # metrics of a step
UP_S = 60.0  # limit for a tracker to contact its server, after importing W&B


@contextmanager
def black_hole() -> Iterator[tuple[str, threading.Event]]:
    """Yield the URL of a server that accepts every connection but never answers, and an event set by the first connection."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    kept: list[socket.socket] = []
    came = threading.Event()

    def accept() -> None:
        while True:
            try:
                kept.append(listener.accept()[0])
            except OSError:
                return
            came.set()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", came
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in kept:
            connection.close()


def per_call_us(work: Callable[[], object]) -> float:
    """Return the microseconds of CPU time per call."""
    started = time.process_time()
    for _ in range(ROUNDS):
        work()
    return (time.process_time() - started) / ROUNDS * 1e6


def counting() -> tuple[float, float]:
    """Return the microseconds to count a group, and the milliseconds of a scrape of a generator's metrics."""
    registry = CollectorRegistry()
    generator, dataprep = GeneratorMetrics(registry), DataprepMetrics(CollectorRegistry())
    header = Header(
        "0-1", 1, 0, 1, "0-1.5", 40_000, 50, [300] * 8, [1.0] * 8, {"exact": [1.0] * 8}, [False] * 8, [3] * 8, [4] * 8,
        "generator-0", 3.0, 0.1, "main", [0] * 8,
    )  # fmt: skip

    def group() -> None:
        generator.claimed.inc(1)
        generator.observe(header)
        generator.submit_s.observe(0.002)
        dataprep.issued.inc(1)
        dataprep.settled["insert"].inc()
        dataprep.lag.observe(1)

    return per_call_us(group), per_call_us(lambda: exposition(registry, run="run", pod="generator-0")) / 1e3


def spans_us(tracing: TraceRecorder) -> float:
    """Return the microseconds for the spans of a group."""

    def group() -> None:
        context = tracing.begin()
        tracing.issued([context], done=True)
        now = time.monotonic()
        for name in SPANS:
            tracing.record(name, context, now, step=3)

    return per_call_us(group)


async def recording_ms(store: Store, first: int) -> float:
    """Return the median milliseconds to write a step's metrics to Redis."""
    taken = []
    for step in range(first, first + RECORDS):
        record = {f"metric/train/{i}": i / 7 for i in range(FIELDS)} | {"step": float(step), "time_s": time.time()}
        started = time.perf_counter()
        await store.monitor.record(record)
        taken.append(time.perf_counter() - started)
        await asyncio.sleep(0.002)
    return statistics.median(taken) * 1e3


@contextmanager
def hanging_tracker(config: RunConfig, folder: Path) -> Iterator[None]:
    """Run a tracker pod whose W&B is online but whose server never answers."""
    path = folder / "resolved.toml"
    path.write_text(to_toml(config))
    with black_hole() as (url, came), (folder / "tracker.log").open("wb") as log:
        environ = os.environ | {"WANDB_MODE": "online", "WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
        command = [sys.executable, "-m", "services.tracker", "--config", str(path), "--name", "tracker-0"]
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            if not came.wait(UP_S):
                raise SystemExit(f"the tracker never contacted its server: {(folder / 'tracker.log').read_text()[-500:]}")
            yield
        finally:
            os.killpg(process.pid, 9)
            process.wait()


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure everything and report."""
    server = RedisServer(folder / "redis")
    server.start()
    config = configured(options.config, folder, server, "tracking.wandb=benchmark")
    figures: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            figures.setdefault(name, []).append(value)

    try:
        with black_hole() as (url, _):
            traced = config.model_copy(update={"tracing": config.tracing.model_copy(update={"endpoint": url})})
            for _ in range(options.repeats):
                group_us, scrape_ms = counting()
                tracing = OtlpTracing(traced, "benchmark", "benchmark")
                note(
                    group_us=group_us, scrape_ms=scrape_ms, trace_off_us=spans_us(TraceRecorder()), trace_on_us=spans_us(tracing)
                )
                tracing.close()
        store = await Store.connect(config.redis.url, config.run.name, server.password)
        await store.run.create(digest(config), "data", config.run.steps, config.slots)
        first = 0
        for _ in range(options.repeats):
            alone = await recording_ms(store, first)
            with hanging_tracker(config, folder):
                beside = await recording_ms(store, first + RECORDS)
            note(record_ms=alone, record_beside_hung_ms=beside, hung_share_of_a_second=(beside - alone) / 1e3)
            first += 2 * RECORDS
        await store.close()
    finally:
        server.stop()
    report({"benchmark": "observing", "records": RECORDS}, figures)


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--config", default="examples/arithmetic/config.toml", help="run whose configuration is used")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of measurements")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
