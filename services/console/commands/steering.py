"""Commands that control a run: pause, resume, scale, drain, checkpoint, restore, stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from services.console.commands import finish
from services.console.options import Api, CaFile, Json, RedisUrl, Role, Run, TokenFile, WaitS, Why, Yes, confirm


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
    as_json: Json = False,
) -> int:
    """Pause services of a run until they are resumed.

    Pods that start later are paused too. Generators freeze their requests in flight (keep), finish them (drain), or abort them
    and hand back their tickets with the tokens generated so far (abort). Dataprep and the trainer pause between two steps. With
    --wait, exit code 1: some pods did not pause in time.
    """
    from services.console.commands import control

    return finish(control.pause(control.Target(run, redis_url, api, token_file, ca_file, as_json), role, mode, why, wait))


def resume(
    run: Run = "",
    redis_url: RedisUrl = "",
    role: Role = "all",
    why: Why = "",
    wait: WaitS = 0.0,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
    as_json: Json = False,
) -> int:
    """Resume paused services.

    With --wait, exit code 1: some pods did not resume in time.
    """
    from services.console.commands import control

    return finish(control.resume(control.Target(run, redis_url, api, token_file, ca_file, as_json), role, why, wait))


def scale(
    words: Annotated[list[str], typer.Argument(metavar="N [RUN]", help="Desired number of generators; 0: the run waits.")],
    redis_url: RedisUrl = "",
    why: Why = "",
    wait: WaitS = 0.0,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
    as_json: Json = False,
) -> int:
    """Set the number of generators while the run trains.

    New generators start and join the next weight sync. Surplus generators finish or hand back their work, and exit. With --wait,
    exit code 1: the fleet did not reach that size in time.
    """
    from services.console.commands import control

    number, run = number_and_run(words)
    return finish(control.scale(control.Target(run, redis_url, api, token_file, ca_file, as_json), number, why, wait))


def drain(
    pod: Annotated[str, typer.Argument(metavar="POD", help="Name of a generator, as grpo status lists it.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Annotated[str, typer.Option(help="Reason, shown while it drains and recorded in its log.")] = "",
    wait: WaitS = 0.0,
    token_file: TokenFile = "",
    ca_file: CaFile = "",
    as_json: Json = False,
) -> int:
    """Drain one generator.

    It finishes or hands back its work, leaves the fleet and exits. It may be restarted afterwards. To reduce the number of
    generators, use `grpo scale`. With --wait, exit code 1: it still had work when the time was up.
    """
    from services.console.commands import control

    return finish(control.drain(control.Target(run, redis_url, "", token_file, ca_file, as_json), pod, why, wait))


def checkpoint(
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Why = "",
    wait: WaitS = 0.0,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
    as_json: Json = False,
) -> int:
    """Make the trainer write a checkpoint now.

    A step in training is finished first. With --wait, exit code 1: the checkpoint was not written in time, or could not be.
    --api must be the trainer's address.
    """
    from services.console.commands import control

    return finish(control.checkpoint(control.Target(run, redis_url, api, token_file, ca_file, as_json), why, wait))


def restore(
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="Step of a checkpoint, as grpo checkpoints lists it.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Why = "",
    wait: WaitS = 0.0,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
    as_json: Json = False,
) -> int:
    """Restore a run to a checkpoint.

    A stopped run is restored when it resumes. Later steps are trained again, on the same prompts in the same order. With
    --wait, exit code 1: the run was not restored, or not in time. --api must be the trainer's address.
    """
    from services.console.commands import control

    return finish(control.restore(control.Target(run, redis_url, api, token_file, ca_file, as_json), step, why, wait))


def stop(
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Why = "",
    wait: WaitS = 0.0,
    yes: Yes = False,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
    as_json: Json = False,
) -> int:
    """End a run early and permanently. On a terminal, ask first.

    The trainer finishes its step, saves and ends the run. To resume later, press Ctrl-C in `grpo run` instead. With --wait, exit
    code 1: the run did not end in time. --api must be dataprep's address.
    """
    from services.console.commands import control

    ask = (lambda question: None) if yes or as_json else confirm
    return finish(control.stop(control.Target(run, redis_url, api, token_file, ca_file, as_json), why, wait, ask))


def number_and_run(words: Sequence[str]) -> tuple[int, str]:
    """Return the number of generators and the run of `grpo scale`, whose first word may be what is scaled."""
    given = list(words[1:] if words[0] == "generators" else words)
    if not given or not given[0].isdecimal():
        raise typer.BadParameter(f"{' '.join(given) or 'nothing'!r} is not a number of generators: write grpo scale N [RUN]")
    if len(given) > 2:
        raise typer.BadParameter(f"{given[2]!r} is one argument too many: write grpo scale N [RUN]")
    return int(given[0]), "".join(given[1:])
