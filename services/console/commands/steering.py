"""Commands that control a run: pause, resume, scale, drain, checkpoint, restore, stop."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from services.console.commands import finish
from services.console.options import Api, CaFile, RedisUrl, Role, Run, TokenFile, WaitS, Why


def pause(
    run: Run = "",
    redis_url: RedisUrl = "",
    role: Role = "all",
    mode: Annotated[Literal["keep", "drain", "abort"], typer.Option(help="What generators do with requests in flight.")] = "keep",
    why: Why = "",
    wait: WaitS = 0.0,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
) -> int:
    """Pause services of a run until they are resumed.

    Pods that start later are paused too. Generators freeze their requests in flight (keep), finish them (drain), or abort them
    and hand back their tickets with the tokens generated so far (abort). Dataprep and the trainer pause between two steps. With
    --wait, exit code 1: some pods have not paused in time.
    """
    from services.console.commands import over_http as steer
    from services.console.commands import verbs

    roles = verbs.roles(role, mode)
    if api:
        return steer.pause(steer.Endpoint(api, token_file, ca_file), run, roles, mode, why, wait)
    return finish(verbs.pause(run, redis_url, roles, mode, why, wait))


def resume(
    run: Run = "",
    redis_url: RedisUrl = "",
    role: Role = "all",
    wait: WaitS = 0.0,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
) -> int:
    """Resume paused services.

    With --wait, exit code 1: some pods have not resumed in time.
    """
    from services.console.commands import over_http as steer
    from services.console.commands import verbs

    roles = verbs.roles(role)
    if api:
        return steer.resume(steer.Endpoint(api, token_file, ca_file), run, roles, wait)
    return finish(verbs.resume(run, redis_url, roles, wait))


def scale(
    what: Annotated[Literal["generators"], typer.Argument(metavar="generators", help="Resource to scale.")],
    number: Annotated[int, typer.Argument(metavar="N", min=0, help="Desired number; 0: the run waits.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Why = "",
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
) -> int:
    """Set the number of generators, while the run trains.

    New generators start and join the next weight sync. Surplus generators finish or hand back their work, and exit.
    """
    from services.console.commands import over_http as steer
    from services.console.commands import scale as scaling

    if api:
        return steer.scale(steer.Endpoint(api, token_file, ca_file), run, number, why)
    return finish(scaling.scale(run, redis_url, number, why))


def drain(
    pod: Annotated[str, typer.Argument(metavar="POD", help="Name of a generator, as grpo status lists it.")],
    run: Run = "",
    wait: WaitS = 0.0,
) -> int:
    """Drain one generator: it finishes or hands back its work, leaves the fleet and exits.

    It may be restarted afterwards. To reduce the number of generators, use `grpo scale`.
    """
    from services.console.commands import over_http as steer

    return finish(steer.drain(pod, run, wait))


def checkpoint(
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Why = "",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is written.")] = False,
) -> int:
    """Make the trainer write a checkpoint now.

    A step in training is finished first. With --wait, exit code 1: the checkpoint could not be written.
    """
    from services.console.commands import checkpoints as verbs

    return finish(verbs.checkpoint(run, redis_url, why, wait))


def restore(
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="Step of a checkpoint, as grpo checkpoints lists it.")],
    run: Run = "",
    redis_url: RedisUrl = "",
) -> int:
    """Restore a run to a checkpoint, now or, if it is stopped, when it resumes.

    Later steps are trained again, on the same prompts in the same order.
    """
    from services.console.commands import checkpoints as verbs

    return finish(verbs.restore(step, run, redis_url))


def stop(
    run: Run = "", redis_url: RedisUrl = "", why: Why = "", api: Api = "", token_file: TokenFile = "", ca_file: CaFile = ""
) -> int:  # fmt: skip
    """End a run early, permanently.

    The trainer finishes its step, saves and ends the run. To resume later, press Ctrl-C in `grpo run` instead. --api must be
    dataprep's address.
    """
    from services.console.commands import over_http as steer
    from services.console.commands import verbs

    if api:
        return steer.stop(steer.Endpoint(api, token_file, ca_file), run, why)
    return finish(verbs.stop(run, redis_url, why))
