"""The worker processes of one environment.

Guarantees: a process that has died is replaced before it gets the next rollout. No process outlives the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from services.config.environments import EnvironmentConfig
from services.confined.scratch import sweep
from services.environment.programs.process import ProgramFailed, ProgramProcess, ProgramUnusable


class ProgramPool:
    """The processes of one environment."""

    def __init__(self, environment: EnvironmentConfig) -> None:
        self.environment = environment
        self.processes = [ProgramProcess(environment) for _ in range(environment.processes)]

    async def start(self) -> None:
        """Start all processes, after deleting what those of killed pods left behind. Raises `ProgramUnusable`."""
        await asyncio.to_thread(sweep)
        await asyncio.gather(*(process.ensure() for process in self.processes))

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncGenerator[ProgramProcess]:
        """Return the process with the fewest rollouts, restarted if it has died. Raises `ProgramFailed`."""
        process = min(self.processes, key=lambda each: each.rollouts)
        process.rollouts += 1
        try:
            try:
                await process.ensure()
            except ProgramUnusable as error:
                raise ProgramFailed(str(error)) from None
            yield process
        finally:
            process.rollouts -= 1

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(process.kill() for process in self.processes))
