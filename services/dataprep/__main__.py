"""Start a dataprep pod: read the prompts, create or attach to the run, lead it or stand by."""

from __future__ import annotations

import sys

from services.protocol.config import digest
from services.runtime.service import Arguments, main, open_service


async def prepare(given: Arguments) -> None:
    """The whole life of the pod."""
    from services.dataprep.api import add_routes
    from services.dataprep.loop import DataprepLoop
    from services.dataprep.metrics import DataprepMetrics
    from services.dataprep.prompts import PromptSource

    config = given.config
    source = PromptSource(config)
    async with open_service("dataprep", config, given.name) as service:
        await service.store.create(digest(config), source.digest, config.run.steps, config.slots)
        dataprep = DataprepLoop(service, source, DataprepMetrics(service.registry))
        service.ready = dataprep.why_idle
        add_routes(service)
        await service.run(dataprep.work)


if __name__ == "__main__":
    sys.exit(main("dataprep", prepare))
