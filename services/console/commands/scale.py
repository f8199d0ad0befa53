"""Implements `grpo scale`, which sets the desired number of generators of a run.

The number is part of the run's state (`RunState.scale`). It is set here or by `POST /v1/fleet/generators` of any service,
outlives the console and the pods, and the last value wins. The component that starts generators applies it; on one machine
that is the launcher. The launcher also records the most generators that it has GPUs for, and requests for more are refused.
If nothing applies the number (`fleet.scaling`), the request is refused.
"""

from __future__ import annotations

import getpass

from services.console.attach import attach
from services.console.commands.verbs import existing, later
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError


async def scale(run: str, redis_url: str, generators: int, why: str) -> int:
    """Set the desired number of generators."""
    async with attach(run, redis_url) as attached:
        state = await existing(attached)
        if state.finished:
            raise ConsoleError(f"run {attached.name} has already finished: {state.finished}", EXIT_CONFIG)
        if refusal := (attached.config.fleet.refusal if attached.config else "") or state.scale.refusal(generators):
            raise ConsoleError(refusal, EXIT_CONFIG)
        await attached.store.run.scale_generators(generators, why or f"{getpass.getuser()}, grpo scale")
    waits = "; the run waits until there is one" if generators == 0 else ""
    print(f"run {attached.name}: desired generators set to {generators}{waits}{later(attached)}")
    return EXIT_OK
