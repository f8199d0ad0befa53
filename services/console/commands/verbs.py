"""Implements `grpo status`, `audit`, `pause`, `resume` and `stop`. Each verb returns the exit code."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.console.attach import Attached, attach
from services.console.commands.over_http import concluded
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.printable import printable, safe_json
from services.operations.observe import Member, fleet
from services.runtime.http.models import ROLES
from services.runtime.http.waiting import not_paused, until_none
from services.store import RunState
from services.store.calls.evaluation import EvaluationState
from services.store.records import PauseMode


async def status(run: str, redis_url: str, as_json: bool) -> int:
    """Show a run's state and its pods."""
    async with attach(run, redis_url) as attached:
        state = await existing(attached)
        members = await fleet(attached.store, attached.ttl_s)
        last = await _last_step(attached)
        evaluation, evaluated = (
            await attached.store.evaluation.state(attached.ttl_s),
            await attached.store.evaluation.last_record(),
        )
    if as_json:
        pods = [{**msgspec.to_builtins(member.status), "age_s": round(member.age_s, 3)} for member in members]
        print_json(
            {
                "run": attached.name,
                "state": vars(state),
                "pods": pods,
                "last_step": last,
                "evaluation": {**msgspec.to_builtins(evaluation), "last": evaluated},
            }
        )
    else:
        _show(attached, state, members, last)
        _show_evaluation(evaluation, evaluated)
    return EXIT_OK


async def audit(run: str, redis_url: str, as_json: bool) -> int:
    """Account for every ticket. Return exit code 1 when the counts do not balance."""
    from services.console.commands.audit import as_table
    from services.console.commands.audit import audit as count

    async with attach(run, redis_url) as attached:
        await existing(attached)
        found = await count(attached.store)
    if as_json:
        print_json({"run": attached.name, **found.as_dict()})
    else:
        from rich.console import Console

        Console().print(as_table(found))
    return EXIT_OK if found.ok else EXIT_FAILED


async def pause(run: str, redis_url: str, roles: Sequence[str], mode: PauseMode, why: str, wait_s: float) -> int:
    """Pause roles until they are resumed."""
    modes: dict[str, PauseMode] = {role: mode if role == "generator" else "keep" for role in roles}
    async with attach(run, redis_url) as attached:
        await existing(attached)
        for role, each in modes.items():
            await attached.store.run.pause(
                role, ": ".join(part for part in (getpass.getuser(), why or "grpo pause") if part), each
            )
        left = await _left(attached, modes, wait_s)
    return concluded(f"run {attached.name}: {', '.join(roles)} paused{later(attached)}", left, wait_s)


async def resume(run: str, redis_url: str, roles: Sequence[str], wait_s: float) -> int:
    """Resume roles."""
    async with attach(run, redis_url) as attached:
        await existing(attached)
        for role in roles:
            await attached.store.run.resume(role)
        left = await _left(attached, dict.fromkeys(roles, ""), wait_s)
    return concluded(f"run {attached.name}: {', '.join(roles)} resumed{later(attached)}", left, wait_s)


async def _left(attached: Attached, modes: Mapping[str, str], wait_s: float) -> list[str]:
    """Return the pods that have not complied after `wait_s`."""
    store, ttl_s = attached.store, attached.ttl_s

    async def look() -> list[str]:
        return [name for role, mode in modes.items() for name in await not_paused(store, role, mode, ttl_s)]

    return await until_none(look, wait_s)


async def stop(run: str, redis_url: str, why: str) -> int:
    """End a run early."""
    async with attach(run, redis_url) as attached:
        state = await existing(attached)
        if state.finished:
            raise ConsoleError(f"run {attached.name} has already finished: {state.finished}", EXIT_CONFIG)
        await attached.store.run.stop(why or f"{getpass.getuser()}, grpo stop")
    print(f"run {attached.name}: stop requested: the trainer finishes its step, saves and ends the run{later(attached)}")
    return EXIT_OK


async def existing(attached: Attached) -> RunState:
    """Return the run's state. Raise `ConsoleError` when there is none."""
    state = await attached.store.run.state()
    if state is None:
        raise ConsoleError(
            f"run {attached.name} does not exist in its Redis: it was never started, or it was deleted", EXIT_CONFIG
        )
    return state


async def _last_step(attached: Attached) -> dict[str, float]:
    entries: Any = await attached.store.client.xrevrange(attached.store.keys.metrics, count=1)
    return msgspec.json.decode(entries[0][1][b"m"]) if entries else {}


def roles(role: str, mode: PauseMode = "keep") -> tuple[str, ...]:
    """Return the roles that `--role` selects. Raise `ConsoleError` for an unknown role, or one without that mode."""
    if role != "all" and role not in ROLES:
        raise ConsoleError(f"--role {role} is not one of all, {', '.join(ROLES)}", EXIT_CONFIG)
    if mode != "keep" and role not in ("all", "generator"):
        raise ConsoleError(
            f"--mode {mode} applies to generators only; {role} pauses between two steps: remove --mode", EXIT_CONFIG
        )
    return ROLES if role == "all" else (role,)


def later(attached: Attached) -> str:
    """Return the end of a message about a request, which a stopped run applies later."""
    return "" if attached.live else "; the run is stopped and applies this when it resumes"


def _show(attached: Attached, state: RunState, members: list[Member], last: Mapping[str, float]) -> None:
    from rich.console import Console

    from services.console.local.screen import fleet_table
    from services.operations import figures

    console = Console(highlight=False)
    mood = state.finished or (f"stopping: {state.stopping}" if state.stopping else "running")
    console.print(f"[bold]{attached.name}[/bold]  {state.committed_step + 1}/{state.steps} steps  {mood}")
    for role, why in sorted(state.paused.items()):
        how = state.pause_modes.get(role, "keep")
        console.print(f"{role} paused{f' ({how})' if how != 'keep' else ''}: {why}", style="yellow", markup=False)
    console.print(
        f"policy version {state.published_version} published, step {state.prepared_step} prepared, "
        f"{state.slots_used}/{state.slots} slots used, checkpoint of step {state.checkpointed_step}"
    )
    console.print(_generators(attached, state, members), markup=False)
    if state.checkpoint_failed:
        console.print(f"checkpoint not written: {printable(state.checkpoint_failed)}", style="yellow", markup=False)
    if last:
        console.print(figures.step_line(last, state.steps, None), markup=False)
    console.print(fleet_table(members, {}) if members else "no pods")


def _generators(attached: Attached, state: RunState, members: list[Member]) -> str:
    """Return a line with the numbers of running, draining and desired generators."""
    pods = [member.status for member in members if member.status.kind == "generator"]
    draining = sum(pod.phase == "draining" for pod in pods)
    wanted = attached.config.generator.count if state.scale.wanted is None and attached.config else state.scale.wanted
    why = f" ({state.scale.why})" if state.scale.why else ""
    wish = "" if wanted is None else f", {wanted} desired{why}"
    return f"generators: {len(pods) - draining} running{f', {draining} draining' if draining else ''}{wish}"


def _show_evaluation(evaluation: EvaluationState, last: Mapping[str, float]) -> None:
    from services.operations import figures

    if found := evaluation.round:
        fault = f"; cannot be completed: {printable(found.fault)}" if found.fault else ""
        print(f"evaluating version {found.version}: {found.done}/{found.total} prompts, {found.volunteers} generators{fault}")
    if last:
        print(figures.evaluation_line(last))
    if evaluation.abandoned:
        print(f"last evaluation abandoned: {printable(evaluation.abandoned)}")


def print_json(value: Any) -> None:
    """Print a value as JSON that is safe for a terminal."""
    print(safe_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()))
