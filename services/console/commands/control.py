"""Implements the commands that control a run, over its Redis or, with `--api`, a service's endpoints. Each returns the exit code.

Guarantees: a request that the run or a service refuses prints one line and sets an exit code; a wait that times out is exit
code 1.
"""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.console import paths
from services.console.attach import attach, existing, later
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.printable import print_json
from services.http.credentials import API_TOKEN_ENV, api_tokens
from services.operations.control import InvalidRequest, Refused, RunControl, modes_of
from services.protocol.errors import NotFound
from services.store import RunState
from services.store.records import ROLES, PauseMode, Role

if TYPE_CHECKING:
    from services.config import RunConfig
    from services.http.client import Client
    from services.operations.inspection.deadletters import RequeueAnswer


@dataclass(frozen=True)
class Target:
    """The run that a command controls, and the way to it."""

    run: str = ""
    redis_url: str = ""
    api: str = ""
    token_file: str = ""
    ca_file: str = ""
    as_json: bool = False


@dataclass(frozen=True)
class Reached:
    """A run that a command can control."""

    control: Any
    prefix: str = ""
    """Start of messages about the run."""
    later: str = ""
    """End of messages about a request to a stopped run."""
    state: RunState | None = None
    """Its state before the request; None: reached through endpoints."""
    live: bool = True
    named: str = ""
    """Its name in questions."""

    def wait(self, wait_s: float) -> float:
        """Return how long to wait for the run to comply: a stopped one does not."""
        return wait_s if self.live else 0.0


@contextlib.asynccontextmanager
async def reach(target: Target) -> AsyncIterator[Reached]:
    """Reach a run's Redis, or the service that `--api` names. Turn refusals into one-line errors."""
    name = ""
    try:
        if target.api:
            with client_of(target.api, target.token_file, target.ca_file, target.run) as client:
                from services.http.control import HttpControl

                yield Reached(HttpControl(client), named=f"the run of {target.api}")
            return
        async with attach(target.run, target.redis_url) as attached:
            name = f"run {attached.name}: "
            state = await existing(attached)
            follows = attached.key("fleet.scaling") in (None, "request")
            fleet = None if follows or attached.config is None else attached.config.fleet
            control = RunControl(attached.store, attached.ttl_s, fleet, attached.folder.checkpoints if attached.folder else None)
            where = f" in {attached.folder.path}" if attached.folder else ""
            yield Reached(control, name, later(attached), state, attached.live, f"run {attached.name}{where}")
    except (InvalidRequest, NotFound, Refused) as error:
        raise ConsoleError(f"{name}{error}", EXIT_CONFIG) from None


@contextlib.contextmanager
def client_of(url: str, token_file: str = "", ca_file: str = "", run: str = "") -> Iterator[Client]:
    """Open a client with the run's token: from `--token-file`, the environment, or the run's folder."""
    from services.config import load_resolved
    from services.http.certificate import shared_name
    from services.http.client import ApiError, Client  # its HTTP library takes long to import

    folder = paths.find(run)
    config = load_resolved(folder.config) if folder else None
    trusted = ca_file or (config.api.ca_file if config else "")
    try:
        with Client(url, _token(token_file, config), trusted, shared_name(config.api) if config else "") as client:
            yield client
    except ApiError as error:
        raise ConsoleError(str(error), EXIT_CONFIG if 0 < error.status < 500 else EXIT_FAILED) from None


def _token(path: str, config: RunConfig | None) -> str:
    if path:
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConsoleError(f"--token-file {path} cannot be read: {error}", EXIT_CONFIG) from None
    if given := os.environ.get(API_TOKEN_ENV, "").strip():
        return given
    if config is None:
        raise ConsoleError(
            f"no token: give --token-file, set {API_TOKEN_ENV}, or name a run whose folder is on this machine", EXIT_CONFIG
        )
    return api_tokens(config).operate


async def pause(target: Target, role: str, mode: PauseMode, why: str, wait_s: float) -> int:
    """Pause roles until they are resumed."""
    roles = roles_of(role, mode)
    async with reach(target) as run:
        refuse_finished(run.state)
        left = await run.control.pause(roles, mode, why or "grpo pause", who(), run.wait(wait_s))
    return concluded(target, f"{run.prefix}{', '.join(roles)} paused{run.later}", left, wait_s, run.live)


async def resume(target: Target, role: str, why: str, wait_s: float) -> int:
    """Resume roles."""
    roles = roles_of(role)
    async with reach(target) as run:
        refuse_finished(run.state)
        left = await run.control.resume(roles, why or "grpo resume", who(), run.wait(wait_s))
    return concluded(target, f"{run.prefix}{', '.join(roles)} resumed{run.later}", left, wait_s, run.live)


async def stop(target: Target, why: str, wait_s: float, ask: Callable[[str], None]) -> int:
    """End a run early. `ask` ends the command if the answer to a question is no."""
    async with reach(target) as run:
        refuse_finished(run.state, "")
        ask(f"End {run.named} permanently? To resume it later, press Ctrl-C in grpo run instead.")
        left = await run.control.stop(why or "grpo stop", who(), run.wait(wait_s))
    what = f"stop requested: the trainer finishes its step, saves and ends the run{run.later}"
    return concluded(target, run.prefix + ("ended" if wait_s and not left else what), left, wait_s, run.live)


async def scale(target: Target, generators: int, why: str, wait_s: float) -> int:
    """Set the desired number of generators, which is part of the run's state and outlives the console and the pods."""
    async with reach(target) as run:
        left = await run.control.scale(generators, why or "grpo scale", who(), run.wait(wait_s))
    waits = "; the run waits until there is one" if generators == 0 else ""
    return concluded(target, f"{run.prefix}desired generators set to {generators}{waits}{run.later}", left, wait_s, run.live)


async def checkpoint(target: Target, why: str, wait_s: float) -> int:
    """Request a checkpoint. Return exit code 1 when it could not be written, or was not written in time."""
    async with reach(target) as run:
        asked = await run.control.checkpoint(why or "grpo checkpoint", who(), run.wait(wait_s))
    if asked.saved:
        return concluded(target, f"{run.prefix}checkpoint of step {asked.step} written")
    if asked.failure:
        raise ConsoleError(f"{run.prefix}{asked.failure}", EXIT_FAILED)
    what = f"{run.prefix}checkpoint requested, of step {asked.step} or the step in training{run.later}"
    return concluded(target, what, ["trainer"], wait_s, run.live)


async def restore(target: Target, step: int, why: str, wait_s: float) -> int:
    """Restore a run to a checkpoint; a stopped run does this when it resumes."""
    async with reach(target) as run:
        asked = await run.control.restore(step, why or "grpo restore", who(), run.wait(wait_s))
    if asked.failure:
        raise ConsoleError(f"{run.prefix}not restored to step {step}: {asked.failure}", EXIT_FAILED)
    left = asked.waiting_for
    what = f"restored to step {step}" if wait_s and not left else f"restore to step {step} requested{run.later}"
    return concluded(target, run.prefix + what, left, wait_s, run.live)


async def drain(target: Target, pod: str, why: str, wait_s: float) -> int:
    """Drain a generator, found by its name in the fleet: it finishes its work, leaves the fleet and exits."""
    async with attach(target.run, target.redis_url) as attached:
        state = await existing(attached)
        if not attached.runs:
            raise ConsoleError(f"run {attached.name} is {attached.condition(state).word}: it has no generators", EXIT_CONFIG)
        members = await attached.store.fleet.members(attached.ttl_s)
    pods = {status.name: status for status in members if status.kind == "generator"}
    if pod not in pods:
        raise ConsoleError(
            f"run {attached.name} has no generator {pod!r}; existing: {', '.join(sorted(pods)) or 'none'}", EXIT_CONFIG
        )
    with client_of(pods[pod].url, target.token_file, target.ca_file, target.run) as client:
        left = client.drain(why or "grpo drain", who(), wait_s).rollouts
    what = f"{pod} is draining: it claims no more tickets"
    if wait_s and not left:
        what = f"{pod} has drained: no ticket is in progress, and it exits"
    return concluded(target, what, [f"{left} tickets of {pod}"] if left else [], wait_s)


async def requeue(target: Target, ids: Sequence[str], everything: bool, reason: str) -> tuple[RequeueAnswer, Reached]:
    """Requeue dead letters."""
    if (bool(ids), everything, bool(reason)).count(True) != 1:
        raise ConsoleError(
            "give exactly one of: ids of dead letters (see grpo inspect deadletter), --reason TEXT, --all", EXIT_CONFIG
        )
    async with reach(target) as run:
        return await run.control.requeue(ids or None, reason), run


def refuse_finished(state: RunState | None, remedy: str = "; to continue it, raise run.steps and start it again") -> None:
    """Raise `Refused` if the run has finished: there is nothing left to apply a request to."""
    if state is not None and state.finished:
        raise Refused(f"it has already finished: {state.finished}{remedy}")


def who() -> str:
    """Return the name of the user, for the run's records; in a container a user id may have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def roles_of(role: str, mode: PauseMode = "keep") -> tuple[Role, ...]:
    """Return the roles that `--role` selects. Raise `ConsoleError` for an unknown role, or one without that mode."""
    chosen: tuple[Role, ...] = ROLES if role == "all" else tuple(known for known in ROLES if known == role)
    if not chosen:
        raise ConsoleError(f"--role {role} is not one of all, {', '.join(ROLES)}", EXIT_CONFIG)
    try:
        modes_of(chosen, mode)
    except InvalidRequest as error:
        raise ConsoleError(f"--mode {mode}: {error}", EXIT_CONFIG) from None
    return chosen


def concluded(target: Target, what: str, left: Sequence[str] = (), wait_s: float = 0.0, live: bool = True) -> int:
    """Print the result of a request and return the exit code. `live`: whether there are services to wait for."""
    late = bool(wait_s and left)
    if target.as_json:
        print_json({"done": what, "waiting_for": list(left), "timed_out": late and live})
    else:
        print(f"{what}; timed out after {wait_s:g} s waiting for {', '.join(left)}" if late and live else what)
    return EXIT_FAILED if late else EXIT_OK
