"""Implements `grpo status` and `grpo audit`. Each returns the exit code."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.console.attach import Attached, attach, existing
from services.console.display.layout import Shown, Styled, cell, show
from services.console.errors import EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.printable import print_json, printable
from services.console.reading.from_folder import folder_instead, show_status
from services.operations.condition import awaited, last_resume
from services.operations.observe import Member, fleet
from services.store import RunState
from services.store.calls.evaluation import EvaluationState


async def status(run: str, redis_url: str, as_json: bool) -> int:
    """Show a run's state and its pods; for a run that is over and whose Redis is gone, show what its folder says."""
    try:
        return await _status(run, redis_url, as_json)
    except ConsoleError as error:
        show_status(folder_instead(run, redis_url, error), as_json)
        return EXIT_OK


async def _status(run: str, redis_url: str, as_json: bool) -> int:
    async with attach(run, redis_url) as attached:
        state = await existing(attached)
        members = await fleet(attached.store, attached.ttl_s)
        last = await _last_step(attached, state)
        dead_letters, failed = await attached.store.dead_letters.count(), await attached.store.run.failed()
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
                "dead_letters": dead_letters,  # as many as are kept
                "failed": failed,
                "evaluation": {**msgspec.to_builtins(evaluation), "last": evaluated},
            }
        )
    else:
        _show(attached, state, members, last, failed)
        _show_evaluation(evaluation, evaluated)
    return EXIT_OK


async def _last_step(attached: Attached, state: RunState) -> dict[str, float]:
    """Return the record of the last step, which may be older than the newest one: a restore may have undone that."""
    last = await attached.store.monitor.last_record()
    if last.get("step", -1) <= state.committed_step:
        return last
    found = await attached.store.inspection.step_record(state.committed_step) or {}
    return {name: value for name, value in found.items() if value is not None}


async def audit(run: str, redis_url: str, as_json: bool) -> int:
    """Account for every ticket. Return exit code 1 when the counts do not balance."""
    from services.console.commands.audit import as_table, counted

    found = await counted(run, redis_url)
    if as_json:
        print_json(found.as_dict())
    else:
        show(as_table(found))
    return EXIT_OK if found.ok else EXIT_FAILED


def _show(
    attached: Attached, state: RunState, members: list[Member], last: Mapping[str, float], failed: int
) -> None:  # fmt: skip
    from services.console.display.fleet import COLOURS, fleet_table, waiting_lines
    from services.operations import figures

    found = attached.condition(state)
    heading = cell(f"{attached.name}  ", "bold") + Styled(f"{state.committed_step + 1}/{state.steps} steps  ", "bold")
    lines: list[Shown] = [heading + cell(found, f"bold {COLOURS[found.word]}")]
    wanted = state.scale.desired(attached.key("fleet.scaling") or "request", attached.key("generator.count"))
    if attached.runs and (what := awaited(state, [member.status for member in members], wanted)):
        lines.append(Styled(f"waiting for {what}", "yellow"))
    versions = f"policy version {state.published_version} published, step {state.prepared_step} prepared"
    slots = f"{state.slots_used}/{state.slots} slots used"
    saved = "no checkpoint yet" if state.checkpointed_step < 0 else f"checkpoint of step {state.checkpointed_step}"
    lines.append(Styled(f"{versions}, {slots}, {saved}"))
    lines.append(Styled(_generators(state, members, wanted)))
    if (resumed := last_resume(state)) and attached.runs and not state.ended:
        lines.append(cell(resumed))
    if state.checkpoint_failed:
        lines.append(cell(f"checkpoint not written: {state.checkpoint_failed}", "yellow"))
    if state.restore_failed:
        step, _, why = state.restore_failed.partition(" ")
        lines.append(cell(f"not restored to step {step}: {why}", "yellow"))
    if failed:
        lines.append(Styled(figures.prompts_failed(failed), "yellow"))
    if last:
        lines.append(Styled(figures.step_line(last, state.steps, None)))
    show(*lines, fleet_table(members, {}) if members else Styled("no pods"))
    show(*waiting_lines(members), soft_wrap=True)


def _generators(state: RunState, members: list[Member], wanted: int | None) -> str:
    """Return a line with the numbers of running, draining and desired generators."""
    pods = [member.status for member in members if member.status.kind == "generator"]
    draining = sum(pod.phase == "draining" for pod in pods)
    why = f" ({state.scale.why})" if state.scale.why else ""
    desired = "" if wanted is None else f", {wanted} desired{why}"
    return f"generators: {len(pods) - draining} running{f', {draining} draining' if draining else ''}{desired}"


def _show_evaluation(evaluation: EvaluationState, last: Mapping[str, float]) -> None:
    from services.operations import figures

    if found := evaluation.round:
        fault = f"; cannot be completed: {printable(found.fault)}" if found.fault else ""
        print(f"evaluating version {found.version}: {found.done}/{found.total} prompts, {found.volunteers} generators{fault}")
    if last:
        print(figures.evaluation_line(last))
    if evaluation.abandoned:
        print(f"last evaluation abandoned: {printable(evaluation.abandoned)}")
