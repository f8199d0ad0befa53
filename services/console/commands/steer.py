"""Commands that control a run: pause, resume, scale, drain, checkpoint, restore, stop, replay requeue.

Guarantees: a request that the run refuses prints one line and sets an exit code; a wait that times out is exit code 1.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import typer

from services.config.root import Api
from services.console.commands.attach import Attached, attach, existing
from services.console.display.answers import answer as shown
from services.console.display.text import show
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.options import Json, RedisUrl, Role, Run, WaitS, Why, Yes, confirm, who
from services.console.printable import print_json
from services.http.asking import Unanswered, ask
from services.http.credentials import API_TOKEN_ENV, api_tokens
from services.operations.control import InvalidRequest, Refused, RunControl
from services.protocol.errors import NotFound
from services.store.records import ROLES
from services.store.records import Role as PausedRole

ENTRY_ID = re.compile(r"\d{13,}-\d+")  # it begins with milliseconds since 1970; a run may be named 2024-11
REMEDY = "; to continue it, raise run.steps and start it again"


async def pause(
    run: Run = "", redis_url: RedisUrl = "", role: Role = "all", why: Why = "", wait: WaitS = 0.0, as_json: Json = False
) -> int:
    """Pause services of a run until they are resumed.

    Pods that start later are paused too. Generators freeze their requests in flight; dataprep and the trainer pause between two
    steps. With --wait, exit code 1: some pods did not pause in time.
    """
    roles = _roles_of(role)
    async with _controlled(run, redis_url, REMEDY) as (found, control):
        left = await control.pause(roles, why or "grpo pause", who(), found.patience_s(wait))
    return _requested(found, f"{', '.join(roles)} paused", left, wait, as_json)


async def resume(
    run: Run = "", redis_url: RedisUrl = "", role: Role = "all", why: Why = "", wait: WaitS = 0.0, as_json: Json = False
) -> int:
    """Resume paused services.

    With --wait, exit code 1: some pods did not resume in time.
    """
    roles = _roles_of(role)
    async with _controlled(run, redis_url, REMEDY) as (found, control):
        left = await control.resume(roles, why or "grpo resume", who(), found.patience_s(wait))
    return _requested(found, f"{', '.join(roles)} resumed", left, wait, as_json)


async def scale(
    words: Annotated[list[str], typer.Argument(metavar="N [RUN]", help="Desired number of generators; 0: the run waits.")],
    redis_url: RedisUrl = "",
    why: Why = "",
    wait: WaitS = 0.0,
    as_json: Json = False,
) -> int:
    """Set the number of generators while the run trains.

    New generators start and join the next weight sync. Surplus generators finish or hand back their work, and exit. With --wait,
    exit code 1: the fleet did not reach that size in time.
    """
    number, run = _number_and_run(words)
    async with _controlled(run, redis_url) as (found, control):
        left = await control.scale(number, why or "grpo scale", who(), found.patience_s(wait))
    waits = "; the run waits until there is one" if number == 0 else ""
    return _requested(found, f"desired generators set to {number}{waits}", left, wait, as_json)


async def drain(
    pod: Annotated[str, typer.Argument(metavar="POD", help="Name of a generator, as grpo status lists it.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Annotated[str, typer.Option(help="Reason, shown while it drains and recorded in its log.")] = "",
    wait: WaitS = 0.0,
    as_json: Json = False,
) -> int:
    """Drain one generator.

    It finishes or hands back its work, leaves the fleet and exits. It may be restarted afterwards. To reduce the number of
    generators, use `grpo scale`. The command asks the pod itself, with the token in GRPO_API_TOKEN or the run's own. With --wait,
    exit code 1: it still had work when the time was up.
    """
    async with attach(run, redis_url) as attached:
        state = await existing(attached)
        if not attached.runs:
            raise ConsoleError(f"run {attached.name} is {attached.condition(state).word}: it has no generators", EXIT_CONFIG)
        members = await attached.store.fleet.members(attached.ttl_s)
    pods = {status.name: status for status in members if status.kind == "generator"}
    if pod not in pods:
        raise ConsoleError(
            f"run {attached.name} has no generator {pod!r}; existing: {', '.join(sorted(pods)) or 'none'}", EXIT_CONFIG
        )
    config, url, body = attached.config, f"{pods[pod].url}/v1/drain", {"why": why or "grpo drain", "who": who()}
    try:
        left = ask(config.api if config else Api(), "POST", url, token=_token(attached), body=body, wait_s=wait)["rollouts"]
    except Unanswered as error:
        raise ConsoleError(str(error), EXIT_CONFIG if 0 < error.status < 500 else EXIT_FAILED) from None
    what = f"{pod} is draining: it claims no more tickets"
    if wait and not left:
        what = f"{pod} has drained: no ticket is in progress, and it exits"
    return _conclude(what, [f"{left} tickets of {pod}"] if left else [], wait, as_json)


async def checkpoint(run: Run = "", redis_url: RedisUrl = "", why: Why = "", wait: WaitS = 0.0, as_json: Json = False) -> int:
    """Make the trainer write a checkpoint now.

    A step in training is finished first. With --wait, exit code 1: the checkpoint was not written in time, or could not be.
    """
    async with _controlled(run, redis_url) as (found, control):
        asked = await control.checkpoint(why or "grpo checkpoint", who(), found.patience_s(wait))
    if asked.saved:
        return _conclude(f"run {found.name}: checkpoint of step {asked.step} written", [], wait, as_json)
    if asked.failure:
        raise ConsoleError(f"run {found.name}: {asked.failure}", EXIT_FAILED)
    return _requested(found, f"checkpoint requested, of step {asked.step} or the step in training", ["trainer"], wait, as_json)


async def restore(
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="Step of a checkpoint, as grpo checkpoints lists it.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Why = "",
    wait: WaitS = 0.0,
    as_json: Json = False,
) -> int:
    """Restore a run to a checkpoint.

    A stopped run is restored when it resumes. Later steps are trained again, on the same prompts in the same order. With
    --wait, exit code 1: the run was not restored, or not in time.
    """
    async with _controlled(run, redis_url) as (found, control):
        asked = await control.restore(step, why or "grpo restore", who(), found.patience_s(wait))
    if asked.failure:
        raise ConsoleError(f"run {found.name}: not restored to step {step}: {asked.failure}", EXIT_FAILED)
    if wait and not asked.waiting_for:
        return _conclude(f"run {found.name}: restored to step {step}", [], wait, as_json)
    return _requested(found, f"restore to step {step} requested", asked.waiting_for, wait, as_json)


async def stop(
    run: Run = "", redis_url: RedisUrl = "", why: Why = "", wait: WaitS = 0.0, yes: Yes = False, as_json: Json = False
) -> int:
    """End a run early and permanently. On a terminal, ask first.

    The trainer finishes its step, saves and ends the run. To resume later, press Ctrl-C in `grpo run` instead. With --wait, exit
    code 1: the run did not end in time.
    """
    async with _controlled(run, redis_url, "") as (found, control):
        if not (yes or as_json):
            where = f" in {found.folder.path}" if found.folder else ""
            confirm(f"End run {found.name}{where} permanently? To resume it later, press Ctrl-C in grpo run instead.")
        left = await control.stop(why or "grpo stop", who(), found.patience_s(wait))
    if wait and not left:
        return _conclude(f"run {found.name}: ended", [], wait, as_json)
    return _requested(found, "stop requested: the trainer finishes its step, saves and ends the run", left, wait, as_json)


async def requeue(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN] [ID]...", help="Run folder or run name, and ids of dead letters.")
    ] = None,
    redis_url: RedisUrl = "",
    everything: Annotated[bool, typer.Option("--all", help="Requeue all dead letters.")] = False,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Requeue the dead letters whose reason contains this text.")] = "",
    as_json: Json = False,
) -> int:
    """Requeue the tickets of dead letters.

    A dead letter stays, with a reason, if it never counted as failed or if its ticket has moved on since. Exit code 1: nothing
    was requeued.
    """
    run, ids = run_and_ids(words or [])
    if (bool(ids), everything, bool(reason)).count(True) != 1:
        raise ConsoleError(
            "give exactly one of: ids of dead letters (see grpo inspect deadletter), --reason TEXT, --all", EXIT_CONFIG
        )
    async with _controlled(run, redis_url) as (found, control):
        answer = await control.requeue(ids or None, reason)
    if as_json:
        print_json(answer)
    else:
        if answer.requeued or answer.refused:
            show(shown(answer))
        print(f"run {found.name}: {len(answer.requeued)} requeued, {len(answer.refused)} refused{found.later}")
    return EXIT_FAILED if answer.refused and not answer.requeued else EXIT_OK


@contextlib.asynccontextmanager
async def _controlled(run: str, redis_url: str, remedy: str | None = None) -> AsyncIterator[tuple[Attached, RunControl]]:
    """Reach a run's Redis. Turn refusals into one-line errors.

    `remedy`: refuse a run that has finished, with this remedy; None: such a run can be controlled, too.
    """
    async with attach(run, redis_url) as found:
        state, fleet = await existing(found), found.config.fleet if found.config else None
        try:
            if state.finished and remedy is not None:
                raise Refused(f"it has already finished: {state.finished}{remedy}")
            yield found, RunControl(found.store, found.ttl_s, fleet, found.folder.checkpoints if found.folder else None)
        except (InvalidRequest, NotFound, Refused) as error:
            raise ConsoleError(f"run {found.name}: {error}", EXIT_CONFIG) from None


def _requested(found: Attached, what: str, left: Sequence[str], wait_s: float, as_json: bool) -> int:
    """Print the result of a request, which a stopped run applies later, and return the exit code."""
    return _conclude(f"run {found.name}: {what}{found.later}", left, wait_s, as_json, found.live)


def _conclude(what: str, left: Sequence[str], wait_s: float, as_json: bool, live: bool = True) -> int:
    """Print the result of a request and return the exit code. `live`: whether there are services to wait for."""
    late = bool(wait_s and left)
    if as_json:
        print_json({"done": what, "waiting_for": list(left), "timed_out": late and live})
    else:
        print(f"{what}; timed out after {wait_s:g} s waiting for {', '.join(left)}" if late and live else what)
    return EXIT_FAILED if late else EXIT_OK


def _token(attached: Attached) -> str:
    """Return the run's token for its services: from the environment, or from its folder."""
    if given := os.environ.get(API_TOKEN_ENV, "").strip():
        return given
    if attached.config is None:
        raise ConsoleError(f"no token: set {API_TOKEN_ENV}, or name a run whose folder is on this machine", EXIT_CONFIG)
    return api_tokens(attached.config).operate


def _roles_of(role: str) -> tuple[PausedRole, ...]:
    """Return the roles that `--role` selects. Raise `ConsoleError` for an unknown role."""
    chosen: tuple[PausedRole, ...] = ROLES if role == "all" else tuple(known for known in ROLES if known == role)
    if not chosen:
        raise ConsoleError(f"--role {role} is not one of all, {', '.join(ROLES)}", EXIT_CONFIG)
    return chosen


def _number_and_run(words: Sequence[str]) -> tuple[int, str]:
    """Return the number of generators and the run of `grpo scale`, whose first word may be what is scaled."""
    given = list(words[1:] if words[0] == "generators" else words)
    if not given or not given[0].isdecimal():
        raise typer.BadParameter(f"{' '.join(given) or 'nothing'!r} is not a number of generators: write grpo scale N [RUN]")
    if len(given) > 2:
        raise typer.BadParameter(f"{given[2]!r} is one argument too many: write grpo scale N [RUN]")
    return int(given[0]), "".join(given[1:])


def run_and_ids(words: Sequence[str]) -> tuple[str, list[str]]:
    """Tell a run's name or folder from ids of dead letters, which look like 1790000000000-0."""
    runs = [word for word in words if not ENTRY_ID.fullmatch(word)]
    if len(runs) > 1:
        raise typer.BadParameter(f"{runs[1]!r} is not the id of a dead letter: grpo inspect deadletter lists them")
    return "".join(runs), [word for word in words if ENTRY_ID.fullmatch(word)]
