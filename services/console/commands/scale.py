"""`grpo scale`: how many generators a run is to have.

The wish is data of the run (`RunState.scale`): it is set here or by `POST /v1/fleet/generators` of any service, outlives
console and pods, and the last one counts. Whoever starts generators follows it, on one machine the launcher; it also says how
many it has room for, so that more are refused where they are asked for. Where nobody follows (`fleet.scaling`), it is refused.
"""

from __future__ import annotations

import getpass

from services.console.attach import attach
from services.console.commands.verbs import existing, later
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError


async def scale(run: str, redis_url: str, generators: int, why: str) -> int:
    """Ask for a number of generators, from now on."""
    async with attach(run, redis_url) as attached:
        state = await existing(attached)
        if state.finished:
            raise ConsoleError(f"run {attached.name} has finished already: {state.finished}", EXIT_CONFIG)
        if refusal := (attached.config.fleet.refusal if attached.config else "") or state.scale.refusal(generators):
            raise ConsoleError(refusal, EXIT_CONFIG)
        await attached.store.scale_generators(generators, why or f"{getpass.getuser()}, grpo scale")
    waits = ", without any the run waits" if generators == 0 else ""
    print(f"run {attached.name}: {generators} generators wanted{waits}{later(attached)}")
    return EXIT_OK
