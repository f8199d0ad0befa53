"""`grpo run` with a proxy between each pod and Redis: `python -m tests.faults.launch` takes grpo's command line.

FAULTS_APPENDFSYNC says how often Redis flushes its file. FAULTS_PROXIES names the ports, `{"generator-0": 40001, …}`.
 Every pod reads its own configuration, which differs only in
`redis.url`; that of a pod which the run itself does not start is written beside the others, for the process that starts it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.config import RunConfig, to_toml
from services.console.commands.__main__ import main
from services.console.run import command, redis_server
from services.console.run.plan import plan_units
from services.runtime.child_processes import ProcessPlan, ServicePlan

_places: dict[str, Path] = {}  # pod -> its own configuration


def proxied(config: RunConfig, path: Path, gpus: Sequence[str]) -> list[ServicePlan]:
    """Return the real plan, in which each pod has its own configuration."""
    if not _places:  # the launcher asks repeatedly, while pods are reading
        _places.update(_own_places(config, path.parent / "pods"))

    def own_place(pod: ProcessPlan) -> ProcessPlan:
        place = str(_places[pod.name])
        argv = tuple(place if word == str(path) else word for word in pod.argv)
        return replace(pod, argv=argv, environ={**pod.environ, "GRPO_CONFIG": place})

    return [replace(unit, pods=tuple(map(own_place, unit.pods))) for unit in plan_units(config, path, gpus)]


def _own_places(config: RunConfig, folder: Path) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    places = {}
    for name, port in json.loads(os.environ["FAULTS_PROXIES"]).items():
        own = config.model_copy(update={"redis": config.redis.model_copy(update={"url": f"redis://127.0.0.1:{port}/0"})})
        place, partial = folder / f"{name}.toml", folder / f"{name}.new"
        partial.write_text(to_toml(own))
        partial.replace(place)
        places[name] = place
    return places


if __name__ == "__main__":
    redis_server.APPENDFSYNC = os.environ["FAULTS_APPENDFSYNC"]
    real = command.run
    command.run = lambda options: real(options, proxied)
    sys.exit(main())
