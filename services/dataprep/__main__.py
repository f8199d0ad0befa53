"""Start a dataprep pod: read the prompts, create or attach to the run, then lead it or stand by.

With `--stay` it stays up after the run is over and serves the control API, and a finished run that is given more steps continues.
"""

from __future__ import annotations

from functools import partial

import structlog

from services.http.entry import Arguments, end_process, main, open_service

log = structlog.get_logger()


async def prepare(given: Arguments) -> None:
    """Run the pod from start to end."""
    from services.dataprep.evaluation.rounds import EvaluationRounds
    from services.dataprep.identity import create_or_attach
    from services.dataprep.loop import DataprepLoop
    from services.dataprep.metrics import DataprepMetrics, EvaluationMetrics, RunMetrics
    from services.dataprep.prompts.catalogue import PromptSource
    from services.dataprep.prompts.curriculum import load_curriculum
    from services.dataprep.replay.sweeping import sweep
    from services.dataprep.run_gauges import RunGauges
    from services.http.endpoints import add_run_routes

    config = given.config
    load_curriculum(config.data.curriculum)  # reports an unusable name before the run exists
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
        service.add_loop("run_gauges", RunGauges(service, RunMetrics(service.registry)).follow)
        if config.redis.payload_shards:
            service.add_loop("sweep", partial(sweep, service))
        add_run_routes(service)
        await service.run(dataprep.work)


if __name__ == "__main__":
    end_process(main("dataprep", prepare, rests=False))
