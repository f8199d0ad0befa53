"""A fake of any service: a real process on a real Redis, but without a model. The trainer counts steps and ends the run on
request; the other services wait for the end of the run.

FAKE_STEP_S: seconds per step. FAKE_EXIT: `<pod>:<code>:<message>` makes that pod exit immediately. FAKE_DEAF: a pod that does
nothing and ignores SIGTERM. FAKE_CHILD: a pod that starts a child process and prints the child's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time

from services.config import digest, load_resolved
from services.protocol.messages import PodStatus
from services.store import Store
from tests.support.servers.admin import admin_password


async def serve(kind: str, path: str, name: str) -> int:
    config = load_resolved(path)
    stopping = asyncio.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, stopping.set)
    if os.environ.get("FAKE_DEAF") == name:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        await asyncio.Event().wait()
    if os.environ.get("FAKE_CHILD") == name:
        print(f"child {(await asyncio.create_subprocess_exec('sleep', '600')).pid}", flush=True)
    ends, code, message = (os.environ.get("FAKE_EXIT", "") + "::").split(":")[:3]
    if ends == name:
        print(f"error: {message}", file=sys.stderr)
        return int(code)
    print(f"up at {os.environ.get('MASTER_PORT')}", flush=True)
    store = await Store.connect(config.redis.url, config.run.name, admin_password(config))
    status = PodStatus(kind, name, os.urandom(4).hex(), "here", os.getpid(), "", "ready", 0, 0, {"tokens_per_s": 7.0})
    if kind == "dataprep":
        await store.run.create(digest(config), "data", config.run.steps, config.slots)
    served = False
    while not stopping.is_set():
        await store.fleet.beat(status, config.fleet.ttl_s)
        state = await store.run.state()
        if state is not None and state.finished and kind != "web":  # the web console runs until it is stopped
            break
        if name == "trainer-0" and state is not None and state.restore >= 0:
            if served:  # like the real trainer, it exits, and its successor restores
                print(f"error: the run is restored to step {state.restore}: restarting from there", file=sys.stderr)
                return 1
            restored = {"restored": state.restore, "incarnation": state.incarnation + 1}
            await store.client.hset(store.keys.run, mapping=restored)  # type: ignore[misc]
            await store.client.hdel(store.keys.run, "restore")  # type: ignore[misc]
        served = True
        if name == "trainer-0" and state is not None:
            if state.stopping:
                await store.run.finish(f"stopped after {state.committed_step + 1} steps")
            else:
                await train_one(store, state.committed_step + 1, config.run.steps)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), float(os.environ.get("FAKE_STEP_S", "0.05")))
    await store.fleet.leave(status)
    await store.close()
    return 0


async def train_one(store: Store, step: int, steps: int) -> None:
    if step == steps:
        await store.run.finish(f"trained {steps} of {steps} steps")
        return
    await store.monitor.record(
        {"step": float(step), "time_s": time.time(), "reward/train/mean": step / steps, "staleness/trained/max": 1.0}
    )
    await store.client.hset(store.keys.run, "committed_step", str(step))


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(sys.argv[1], sys.argv[sys.argv.index("--config") + 1], sys.argv[sys.argv.index("--name") + 1])))
