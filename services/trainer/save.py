"""Have the trainer write a checkpoint before one of its pods ends: `python -m services.trainer.save`.

A cluster runs it before it ends a pod (docs/kubernetes.md). It makes the request through Redis, since only the pod of rank 0 has
the endpoint. Guarantees: it returns at once where there is nothing to write: no run or one that has finished, no trainer or one
that still loads, every trained step in a checkpoint.
Waits for: the checkpoint. Unblocked by: the trainer, which writes it, fails to, restarts or leaves the fleet; at the latest by
whoever started this module, as it has no limit of its own.
"""

from __future__ import annotations

import asyncio
import sys

from services.config import ConfigError
from services.http.credentials import redis_login
from services.http.entry import Arguments, arguments, report
from services.operations.condition import LOADING
from services.operations.control import LONGEST_WAIT_S, RunControl
from services.protocol.errors import NotFound, StoreError
from services.runtime.exits import EXIT_OK
from services.runtime.loops import Broken, end_tasks
from services.store import Store

POLL_S = 0.5
EMPTY = (*LOADING, "restoring")  # phases in which the trainer has no weights that are newer than its last checkpoint


async def save(store: Store, ttl_s: float, who: str) -> str:
    """Request a checkpoint, wait until it is written, and return what was done. Raise `Broken` when it could not be written."""
    if why_not := await nothing_to_write(store, ttl_s):
        return why_not
    writing = asyncio.create_task(RunControl(store, ttl_s).checkpoint("a trainer pod is terminating", who, LONGEST_WAIT_S))
    try:
        while not (await asyncio.wait([writing], timeout=POLL_S))[0]:
            if why_not := await nothing_to_write(store, ttl_s):
                return why_not
        asked = writing.result()
    except NotFound as error:
        return f"nothing to write: {error}"
    finally:
        await end_tasks([writing])
    if not asked.saved:
        raise Broken(asked.failure or f"the trainer did not write the checkpoint of step {asked.step} in {LONGEST_WAIT_S:g} s")
    return f"checkpoint of step {asked.step} written"


async def nothing_to_write(store: Store, ttl_s: float) -> str:
    """Return why no checkpoint can be written or is needed; empty: one can be, and has not been."""
    state = await store.run.state()
    if state is None:
        return "nothing to write: the run does not exist yet"
    if state.finished:
        return f"nothing to write: the run has finished: {state.finished}"
    if state.checkpointed_step >= state.committed_step:
        return "nothing to write: every trained step is in a checkpoint"
    trainers = [(age_s, status) for status, age_s in await store.fleet.heard(ttl_s) if status.kind == "trainer"]
    if not trainers:
        return "nothing can be written: no trainer is running"
    _, newest = min(trainers, key=lambda one: one[0])  # a killed one stays in the fleet until its heartbeat expires
    return f"nothing can be written: the trainer is {newest.phase}" if newest.phase in EMPTY else ""


async def _save(given: Arguments) -> str:
    config = given.config
    store = await Store.connect(config.redis.url, config.run.name, redis_login(config, "trainer"))
    try:
        return await save(store, config.fleet.ttl_s, given.name)
    finally:
        await store.close()


def main() -> int:
    """Save, and return the exit code."""
    try:
        print(asyncio.run(_save(arguments("trainer"))), flush=True)
    except (ConfigError, StoreError, Broken) as error:
        return report(error)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
