"""`grpo run` with fake services in a separate process: `python -m tests.console.run.launch` takes grpo's arguments.

FAKE_REPORT=1 also draws the report, which takes longer than all the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.config import RunConfig
from services.console.commands.__main__ import main
from services.console.run import command, launcher, report, supervision
from services.console.run.plan import plan_units
from services.runtime.child_processes import ServicePlan


def fake_units(config: RunConfig, path: Path, gpus: Sequence[str]) -> list[ServicePlan]:
    """Return the real plan with each service replaced by the fake."""

    def fake(argv: Sequence[str]) -> tuple[str, ...]:
        return (argv[0], "-m", "tests.console.fake_service", argv[2].removeprefix("services."), *argv[3:])

    return [
        replace(child, pods=tuple(replace(pod, argv=fake(pod.argv)) for pod in child.pods))
        for child in plan_units(config, path, gpus)
    ]


if __name__ == "__main__":
    supervision.FIRST_PAUSE_S, supervision.DEATHS_IN_A_ROW, launcher.WAIT_TOLD_S = 0.02, 2, 0.5
    real = command.run
    command.run = lambda options: real(options, fake_units, lambda config: [])
    if "FAKE_REPORT" not in os.environ:
        report.write_report = lambda rows, summary, out: None
    sys.exit(main())
