"""`grpo status`, `audit`, `pause`, `resume` and `stop`: each a look at, or a wish about, one run. Returns the exit code."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from typing import Any

import msgspec

from services.console.attach import Attached, attach
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.observe import Member, fleet
from services.protocol.store import RunState

ROLES = ("generator", "dataprep", "trainer")


async def status(run: str, redis_url: str, as_json: bool) -> int:
    """Show a run's state and its pods."""
    async with attach(run, redis_url) as attached:
        state = await _state(attached)
        members = await fleet(attached.store, attached.ttl_s)
        last = await _last_step(attached)
    if as_json:
        pods = [{**msgspec.to_builtins(member.status), "age_s": round(member.age_s, 3)} for member in members]
        _print_json({"run": attached.name, "state": vars(state), "pods": pods, "last_step": last})
    else:
        _show(attached.name, state, members, last)
    return EXIT_OK


async def audit(run: str, redis_url: str, as_json: bool) -> int:
    """Account for every ticket; exit code 1 when the account does not balance."""
    from services.console.audit import as_table
    from services.console.audit import audit as count

    async with attach(run, redis_url) as attached:
        await _state(attached)
        found = await count(attached.store)
    if as_json:
        _print_json({"run": attached.name, **found.as_dict()})
    else:
        from rich.console import Console

        Console().print(as_table(found))
    return EXIT_OK if found.ok else EXIT_FAILED


async def pause(run: str, redis_url: str, role: str, why: str) -> int:
    """Ask a role, or all, to pause until resumed."""
    async with attach(run, redis_url) as attached:
        await _state(attached)
        for each in _roles(role):
            await attached.store.pause(each, why or f"{getpass.getuser()}, grpo pause")
    print(f"run {attached.name}: {', '.join(_roles(role))} paused{_later(attached)}")
    return EXIT_OK


async def resume(run: str, redis_url: str, role: str) -> int:
    """Let a role, or all, go on."""
    async with attach(run, redis_url) as attached:
        await _state(attached)
        for each in _roles(role):
            await attached.store.resume(each)
    print(f"run {attached.name}: {', '.join(_roles(role))} may go on{_later(attached)}")
    return EXIT_OK


async def stop(run: str, redis_url: str, why: str) -> int:
    """Ask a run to end early."""
    async with attach(run, redis_url) as attached:
        state = await _state(attached)
        if state.finished:
            raise ConsoleError(f"run {attached.name} has finished already: {state.finished}", EXIT_CONFIG)
        await attached.store.stop(why or f"{getpass.getuser()}, grpo stop")
    print(f"run {attached.name}: the trainer finishes its step, saves and ends the run{_later(attached)}")
    return EXIT_OK


async def _state(attached: Attached) -> RunState:
    state = await attached.store.state()
    if state is None:
        raise ConsoleError(f"run {attached.name} does not exist in its Redis: it was never started, or was deleted", EXIT_CONFIG)
    return state


async def _last_step(attached: Attached) -> dict[str, float]:
    entries: Any = await attached.store.client.xrevrange(attached.store.keys.metrics, count=1)
    return msgspec.json.decode(entries[0][1][b"m"]) if entries else {}


def _roles(role: str) -> tuple[str, ...]:
    if role == "all":
        return ROLES
    if role not in ROLES:
        raise ConsoleError(f"--role {role} is not one of all, {', '.join(ROLES)}", EXIT_CONFIG)
    return (role,)


def _later(attached: Attached) -> str:
    return "" if attached.live else "; it is not running now, and will find this when it goes on"


def _show(name: str, state: RunState, members: list[Member], last: Mapping[str, float]) -> None:
    from rich.console import Console

    from services.console import figures
    from services.console.screen import fleet_table

    console = Console(highlight=False)
    mood = state.finished or (f"stopping: {state.stopping}" if state.stopping else "going on")
    console.print(f"[bold]{name}[/bold]  {state.committed_step + 1}/{state.steps} steps  {mood}")
    for role, why in sorted(state.paused.items()):
        console.print(f"{role} paused: {why}", style="yellow", markup=False)
    console.print(
        f"policy version {state.published_version} published, step {state.prepared_step} prepared, "
        f"{state.slots_used}/{state.slots} slots used, checkpoint of step {state.checkpointed_step}"
    )
    if last:
        console.print(figures.step_line(last, state.steps, None), markup=False)
    console.print(fleet_table(members, {}) if members else "no pods")


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
