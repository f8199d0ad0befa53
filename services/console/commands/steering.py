"""Commands that change what a run does: pause, resume, scale, drain, checkpoint, restore, stop."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from services.console.commands import finish
from services.console.options import Api, CaFile, RedisUrl, Role, Run, TokenFile, WaitS, Why


def pause(
    run: Run = "",
    redis_url: RedisUrl = "",
    role: Role = "all",
    mode: Annotated[
        Literal["keep", "drain", "abort"], typer.Option(help="What becomes of requests of generators that are under way.")
    ] = "keep",
    why: Why = "",
    wait: WaitS = 0.0,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
) -> int:
    """Pause a role of a run until it is resumed.

    Pods that start later stay paused too. Requests of generators are kept where they are (keep), finished (drain), or ended
    and their tickets handed back with the tokens made so far (abort); dataprep and trainer halt between two steps. With --wait,
    exit code 1 says that somebody has not followed by then.
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
    """Let a paused role go on. With --wait, exit code 1 says who has not followed by then."""
    from services.console.commands import over_http as steer
    from services.console.commands import verbs

    roles = verbs.roles(role)
    if api:
        return steer.resume(steer.Endpoint(api, token_file, ca_file), run, roles, wait)
    return finish(verbs.resume(run, redis_url, roles, wait))


def scale(
    what: Annotated[Literal["generators"], typer.Argument(metavar="generators", help="What there are to be more or fewer of.")],
    number: Annotated[int, typer.Argument(metavar="N", min=0, help="How many; 0: the run waits.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Why = "",
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
) -> int:
    """Have N generators from now on, while the run trains.

    New ones start and join the next weight sync; the last ones finish what they do, or hand it back, and end.
    """
    from services.console.commands import over_http as steer
    from services.console.commands import scale as scaling

    if api:
        return steer.scale(steer.Endpoint(api, token_file, ca_file), run, number, why)
    return finish(scaling.scale(run, redis_url, number, why))


def drain(
    pod: Annotated[str, typer.Argument(metavar="POD", help="Name of a generator (grpo status).")],
    run: Run = "",
    wait: WaitS = 0.0,
) -> int:
    """Have one generator finish or hand back what it does, leave and exit.

    Whoever starts generators may start it again: `grpo scale` is for fewer of them.
    """
    from services.console.commands import over_http as steer

    return finish(steer.drain(pod, run, wait))


def checkpoint(
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Why = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is written.")] = False,
) -> int:
    """Have the trainer write a checkpoint now.

    A step that is being trained is trained to its end first. With --wait, exit code 1 says that it could not be written.
    """
    from services.console.commands import checkpoints as verbs

    return finish(verbs.checkpoint(run, redis_url, why, wait))


def restore(
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="Step of a checkpoint (grpo checkpoints).")],
    run: Run = "",
    redis_url: RedisUrl = "",
) -> int:
    """Take a run back to a checkpoint, while it runs or for when it goes on.

    What came after is trained anew, with the same prompts in the same order.
    """
    from services.console.commands import checkpoints as verbs

    return finish(verbs.restore(step, run, redis_url))


def stop(
    run: Run = "", redis_url: RedisUrl = "", why: Why = "", api: Api = "", token_file: TokenFile = "", ca_file: CaFile = ""
) -> int:  # fmt: skip
    """End a run early, for good.

    The trainer finishes its step, saves and ends the run. To go on later, press Ctrl-C in `grpo run` instead. --api is
    dataprep's.
    """
    from services.console.commands import over_http as steer
    from services.console.commands import verbs

    if api:
        return steer.stop(steer.Endpoint(api, token_file, ca_file), run, why)
    return finish(verbs.stop(run, redis_url, why))
