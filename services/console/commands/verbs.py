"""Implements `grpo status` and `grpo audit`. Each returns the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from services.console.attach import Attached, attach, existing
from services.console.errors import EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.printable import cell, print_json, printable
from services.console.reading.from_folder import folder_instead, show_status
from services.operations.awaited import awaited
from services.operations.observe import Member, fleet
from services.store import RunState
from services.store.calls.evaluation import EvaluationState

WIDE = 160  # columns where there is no terminal, as in `kubectl exec`: names of pods differ at their ends


async def status(run: str, redis_url: str, as_json: bool) -> int:
    """Show a run's state and its pods; of a run that is over and whose Redis is gone, what its folder says."""
    try:
        return await _status(run, redis_url, as_json)
    except ConsoleError as error:
        show_status(folder_instead(run, redis_url, error), as_json)
        return EXIT_OK


async def _status(run: str, redis_url: str, as_json: bool) -> int:
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
                "condition": vars(attached.condition(state)),
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
    from services.console.commands.audit import as_table, counted

    found = await counted(run, redis_url)
    if as_json:
        print_json(found.as_dict())
    else:
        from rich.console import Console

        Console().print(as_table(found))
    return EXIT_OK if found.ok else EXIT_FAILED


async def _last_step(attached: Attached) -> dict[str, float]:
    entries: Any = await attached.store.client.xrevrange(attached.store.keys.metrics, count=1)
    return msgspec.json.decode(entries[0][1][b"m"]) if entries else {}


def _show(attached: Attached, state: RunState, members: list[Member], last: Mapping[str, float]) -> None:
    from rich.console import Console
    from rich.text import Text

    from services.console.display.screen import COLOURS, fleet_table, waiting_lines
    from services.operations import figures

    console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)
    found = attached.condition(state)
    heading = cell(f"{attached.name}  ", "bold") + Text(f"{state.committed_step + 1}/{state.steps} steps  ")
    console.print(heading + cell(found, COLOURS[found.word]))
    wanted = attached.config.generator.count if state.scale.wanted is None and attached.config else state.scale.wanted
    if attached.runs and (what := awaited(state, [member.status for member in members], wanted)):
        console.print(f"waiting for {what}", style="yellow", markup=False)
    console.print(
        f"policy version {state.published_version} published, step {state.prepared_step} prepared, "
        f"{state.slots_used}/{state.slots} slots used, checkpoint of step {state.checkpointed_step}"
    )
    console.print(_generators(state, members, wanted), markup=False)
    if state.checkpoint_failed:
        console.print(f"checkpoint not written: {printable(state.checkpoint_failed)}", style="yellow", markup=False)
    if last:
        console.print(figures.step_line(last, state.steps, None), markup=False)
    console.print(fleet_table(members, {}) if members else "no pods")
    for line in waiting_lines(members):
        console.print(line, soft_wrap=True)


def _generators(state: RunState, members: list[Member], wanted: int | None) -> str:
    """Return a line with the numbers of running, draining and desired generators."""
    pods = [member.status for member in members if member.status.kind == "generator"]
    draining = sum(pod.phase == "draining" for pod in pods)
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
