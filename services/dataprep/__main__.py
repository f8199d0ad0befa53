"""Start a dataprep pod: read the prompts, create or attach to the run, then lead it or stand by.

With `--stay` it stays up after the run is over and serves the control API, and a finished run that is given more steps continues.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import structlog

from services.http.entry import Arguments, end_process, main, open_service
from services.runtime.loops import Loop
from services.runtime.service import Service

log = structlog.get_logger()

PAUSE_S, LONGEST_PAUSE_S = 2.0, 20.0  # between sweeps
SHARE = 20  # ratio of a pause to the preceding sweep, which reads all payloads at about 2 us each
SWEEP_LIMIT_S = 300.0  # enough for millions of payloads, or for a slow shard; nothing else waits for it


async def prepare(given: Arguments) -> None:
    """Run the pod from start to end."""
    from services.dataprep.evaluation_rounds import EvaluationRounds
    from services.dataprep.identity import create_or_attach
    from services.dataprep.loop import DataprepLoop
    from services.dataprep.metrics import DataprepMetrics, EvaluationMetrics, RunMetrics
    from services.dataprep.prompts.catalogue import PromptSource
    from services.dataprep.prompts.curriculum import load_curriculum
    from services.dataprep.run_gauges import show_run
    from services.http.endpoints import add_run_routes

    config = given.config
    load_curriculum(config.data.curriculum_function)  # reports an unusable name before the run exists
    source = PromptSource(config)
    evaluated = PromptSource(config, config.evaluation.sources) if config.evaluation.every_steps else None
    for remark in (*source.remarks, *(evaluated.remarks if evaluated else ())):
        log.warning(remark.what, source=remark.source, remedy=remark.remedy)
    async with open_service("dataprep", config, given.name) as service:
        service.stays = given.stay
        await create_or_attach(service.store, config, source.digest)
        evaluation = EvaluationRounds(config, service.store, evaluated, EvaluationMetrics(service.registry), service.tracing)
        dataprep = DataprepLoop(service, source, DataprepMetrics(service.registry), evaluation)
        service.ready = dataprep.why_unready
        service.add_loop("run_gauges", partial(show_run, service, RunMetrics(service.registry)))
        if service.store.payloads.shards:
            service.add_loop("sweep", partial(sweep, service))
        add_run_routes(service)
        await service.run(dataprep.work)


async def sweep(service: Service, loop: Loop) -> None:
    """While this process leads, repeatedly delete payloads in shards that no longer belong to a group (store/payloads.py):
    a finished group uses memory until the next sweep at most, even if processes die meanwhile. Sweeps of up to one second take at
    most a twentieth of this process' time; after longer ones it pauses for 20 s.
    """
    loop.limit_s = SWEEP_LIMIT_S
    while True:
        began = time.monotonic()
        state = service.view.state
        if state is not None and state.leader == service.status.member:  # others could sweep, too, but need not
            await service.store.payloads.sweep()
        loop.progress()
        await asyncio.sleep(min(max(PAUSE_S, SHARE * (time.monotonic() - began)), LONGEST_PAUSE_S))


if __name__ == "__main__":
    end_process(main("dataprep", prepare, rests=False))
