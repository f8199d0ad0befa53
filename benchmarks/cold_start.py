"""The cold start of a generator that joins an active run: from the start of its process to its first token and first group.

    python benchmarks/cold_start.py --json

`grpo run` trains examples/arithmetic with one vLLM generator. Then one more is requested, as by `grpo scale`, `--joiners` times.
For each, seconds since its process started: `registered_s`, its first heartbeat; `loaded_s`, its engine is ready for weights;
`synced_s`, it holds the published weights; `token_s`, it samples (observed through heartbeats, which come every 0.3 s here);
`group_s`, its first group is settled. `registered_to_group_s` is the time from its first heartbeat to that. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

if __name__ == "__main__":  # `python benchmarks/cold_start.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report, run
from services.config import load_resolved
from services.console.run.folder import RunFolder
from services.protocol import codec
from services.protocol.messages import Header, PodStatus
from services.runtime.process_tools import die_with_parent
from services.store import Store

ROOT = Path(__file__).parent.parent
CONFIG = "examples/arithmetic/config.toml"
POLL_S = 0.02
LIMIT_S = 300.0
FIRST_STEPS = 3  # the run counts as active after these


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Store]:
    """Run the example with one generator, and yield its store after the first steps."""
    place = RunFolder(folder / "cold")
    given = ["run.name=cold", f"run.dir={folder}", "run.steps=100000", "generator.count=1", "fleet.ttl_s=3"]
    command = [sys.executable, "-m", "services.console.commands", "run", CONFIG, "--fresh", "--no-screen", *given]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
            command, cwd=ROOT, stdout=log, stderr=log, preexec_fn=die_with_parent
        )
    store = None
    try:
        async with asyncio.timeout(LIMIT_S):
            while store is None or (state := await store.run.state()) is None or state.committed_step < FIRST_STEPS:
                if process.poll() is not None:
                    raise SystemExit(f"grpo run exited: {(folder / 'log').read_text()[-1000:]}")
                await asyncio.sleep(0.5)
                if store is None and place.config.exists() and (place.redis / "password").exists():
                    with contextlib.suppress(OSError, RuntimeError):
                        url, password = load_resolved(place.config).redis.url, (place.redis / "password").read_text().strip()
                        store = await Store.connect(url, "cold", password)
        yield store
    finally:
        if store is not None:
            await store.close()
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.wait, 120)


async def first_group(store: Store, pod: str) -> float:
    """Wait until the first group of a pod is settled; return the clock time."""
    last = (await store.client.xinfo_stream(store.keys.headers))["last-generated-id"]
    while True:
        streams: Any = await store.client.xread({store.keys.headers: last}, block=1000)
        for _, entries in streams:
            for last, fields in entries:
                if codec.decode(fields[b"body"], Header).generator == pod:
                    while await store.client.xrange(store.keys.headers, last, last):
                        await asyncio.sleep(0.001)
                    return time.time()


def began(pod: str) -> float:
    """Return the clock time at which the process of a pod started."""
    for process in psutil.process_iter(["cmdline", "create_time"]):
        words = process.info["cmdline"] or []
        if words[-2:] == ["--name", pod] and "services.generator" in words:
            return process.info["create_time"]
    raise LookupError(f"no process runs {pod}")


async def join(store: Store, watching: Store, number: int) -> dict[str, float]:
    """Request one more generator than `number`; return the seconds to each point of its start."""
    pod, seen = f"generator-{number}", dict[str, float]()
    settled = asyncio.create_task(first_group(watching, pod))
    await store.run.scale_generators(number + 1, "benchmark")

    def note(status: PodStatus) -> None:
        now = time.time()
        seen.setdefault("registered_s", now)
        for name, reached in {
            "loaded_s": status.phase not in ("starting", "loading"), "synced_s": status.version >= 0,
            "token_s": status.gauges.get("tokens_per_s", 0.0) > 0,
        }.items():  # fmt: skip
            if reached:
                seen.setdefault(name, now)

    async with asyncio.timeout(LIMIT_S):
        while not (settled.done() and len(seen) == 4):
            for status in await store.fleet.members(60):
                if status.name == pod:
                    note(status)
            await asyncio.sleep(POLL_S)
    start = began(pod)
    seen["group_s"] = settled.result()
    return {name: at - start for name, at in seen.items()} | {"registered_to_group_s": seen["group_s"] - seen["registered_s"]}


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Add one generator after another to a run, and report."""
    subprocess.run(  # noqa: ASYNC221 - nothing else runs yet
        [sys.executable, "-m", "examples.arithmetic.warmstart"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    samples: dict[str, list[float]] = {}
    async with running(folder) as store:
        watching = await Store.connect(store.connection.url, "cold", (folder / "cold/redis/password").read_text().strip())
        for number in range(1, 1 + options.joiners):
            found = await join(store, watching, number)
            for name, value in found.items():
                samples.setdefault(name, []).append(value)
            if not options.json:
                print(f"generator-{number}: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)
        await watching.close()
    report({"benchmark": "cold_start"}, samples)


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--joiners", type=int, default=2, help="generators that join")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
