"""`grpo run` with fake services, as a process of its own: `python -m tests.console.launch` takes grpo's command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.console import run, supervision
from services.console.__main__ import main
from services.console.plan import UnitPlan, plan_units
from services.protocol.config import RunConfig


def fake_units(config: RunConfig, path: Path, gpus: Sequence[str]) -> list[UnitPlan]:
    """The real plan, with the fake in the place of each service."""

    def fake(argv: Sequence[str]) -> tuple[str, ...]:
        return (argv[0], "-m", "tests.console.fake_service", argv[2].removeprefix("services."), *argv[3:])

    return [
        replace(unit, pods=tuple(replace(pod, argv=fake(pod.argv)) for pod in unit.pods)) for unit in plan_units(config, path, gpus)
    ]


if __name__ == "__main__":
    supervision.FIRST_PAUSE_S = 0.02
    real = run.run
    run.run = lambda options: real(options, fake_units)
    sys.exit(main())
