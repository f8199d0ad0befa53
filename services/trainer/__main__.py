"""Start a trainer rank: rank 0 leads and is the pod that others see; the other ranks follow it.

The environment says which rank this is: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, as torchrun sets them.

Guarantees: SIGTERM ends a rank that has not loaded yet immediately, even while it waits for the others in a call that runs no
Python signal handler. After loading, a SIGTERM to any rank makes rank 0 end all of them in order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from services.config import RunConfig
from services.http.entry import Arguments, arguments, connect, end_process, open_service, report
from services.protocol.errors import StoreError
from services.runtime import logs
from services.runtime.exits import EXIT_OK
from services.runtime.loops import FATAL, Loop
from services.runtime.portal import END_S, Portal
from services.runtime.service import Service
from services.store import Store

if TYPE_CHECKING:
    from services.trainer.worker import Worker

POLL_S = 1.0  # how often a trainer that waits for its run checks for a reason to stop


def main(argv: list[str] | None = None) -> int:
    """Run this rank until the run ends. Returns the exit code."""
    try:
        given = arguments("trainer", argv)
        logs.configure(given.config.run.name, given.name)
        portal = Portal()
        try:
            if os.environ.get("RANK", "0") == "0":
                _lead(given, portal)
            else:
                _follow(given, portal)
        finally:
            portal.close()
    except KeyboardInterrupt:
        return EXIT_OK
    except (*FATAL, StoreError) as error:
        return report(error)
    return EXIT_OK


def _follow(given: Arguments, portal: Portal) -> None:
    from services.trainer import ranks
    from services.trainer.ranks import RankCommands

    def stop(_: int, __: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 has gone, which ends the next collective
            ranks.request_stop()

    config = given.config
    store = portal.call(connect("trainer", config))
    here = contextlib.AsyncExitStack()
    try:
        if os.environ.get("LOCAL_RANK") == "0":  # first rank of its own node: probes find endpoints there as on rank 0's
            portal.call(here.enter_async_context(open_service("trainer", config, given.name)))
        worker = _worker(config, store, portal)
        signal.signal(signal.SIGTERM, stop)  # rank 0 says when to exit; its death ends the collective
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            RankCommands(worker.operations()).follow()
        finally:
            worker.close()
    finally:
        portal.call(here.aclose())
        portal.call(store.close())


def _lead(given: Arguments, portal: Portal) -> None:
    from services.trainer import ranks
    from services.trainer.loop import TrainLoop
    from services.trainer.metrics import TrainerMetrics
    from services.trainer.ranks import RankCommands

    opened: concurrent.futures.Future[Service] = concurrent.futures.Future()
    trained = asyncio.Event()
    hosting = portal.start(_host(given, opened, trained))

    def not_opened(ended: concurrent.futures.Future[None]) -> None:
        if not opened.done():
            opened.set_exception(ended.exception() or RuntimeError("the service ended before it started serving"))

    hosting.add_done_callback(not_opened)
    service = opened.result()

    def stop(_: int, __: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            portal.loop.call_soon_threadsafe(service.stop)

    def fault() -> None:
        if hosting.done():
            hosting.result()

    try:
        portal.loop.call_soon_threadsafe(partial(service.say, phase="loading"))
        worker = _worker(given.config, service.store, portal)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        commands = RankCommands(worker.operations())
        while not (created := portal.call(service.created(POLL_S))) and not service.stopping.is_set():
            if ranks.stop_requested():
                break
            fault()
            commands.keep_waiting()
        if created:
            TrainLoop(service, portal, worker, commands, TrainerMetrics(service.registry), fault).run()
        else:
            commands.dismiss()
    except KeyboardInterrupt:
        pass  # interrupted while loading: the service shuts down in order
    finally:
        portal.loop.call_soon_threadsafe(trained.set)
        concurrent.futures.wait([hosting], END_S)  # also after an error: the pod leaves before the portal closes
    hosting.result()


async def _host(given: Arguments, opened: concurrent.futures.Future[Service], trained: asyncio.Event) -> None:
    """Run the pod's endpoints, heartbeat and view next to the main thread that trains."""
    from services.http.endpoints import add_checkpoint_routes

    async def until_trained(loop: Loop) -> None:
        loop.limit_s = float("inf")
        await trained.wait()

    async with open_service("trainer", given.config, given.name) as service:
        service.ready = lambda: "" if service.status.phase not in ("starting", "loading") else service.status.phase
        add_checkpoint_routes(service)
        opened.set_result(service)
        await service.run(until_trained)


def _worker(config: RunConfig, store: Store, portal: Portal) -> Worker:
    from pathlib import Path

    import deepspeed  # noqa: F401 - `World` would import it

    from services.trainer.ranks import World
    from services.trainer.step.policy import Policy
    from services.trainer.worker import Worker

    policy = Policy(config, World.from_environment())
    return Worker(config, store, portal, policy, Path(config.run.dir) / config.run.name)


if __name__ == "__main__":
    end_process(main())
