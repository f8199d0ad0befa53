"""The commands that look at a run: ls, status, logs, smoke, checkpoints.

Guarantees: they change nothing; text of logs cannot move the cursor. `ls`, `logs` and `checkpoints` read only folders: a run may
be running, stopped or killed.
Waits for: new lines of logs (`--follow`), and steps (`smoke`). Unblocked by: polls every `LOGS_POLL_S` and `STEPS_POLL_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from services.config import ConfigError
from services.console.commands.attach import NOTE, Attached, attach, existing, folder_instead
from services.console.display.answers import answer
from services.console.display.screen import COLOURS, fleet_table, waiting_lines
from services.console.display.text import cell, show, table
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.options import SMOKE_WAIT_S, Json, RedisUrl, Run
from services.console.paths import RunPaths
from services.console.paths import existing as existing_folder
from services.console.printable import print_json, printable, safe_json, say
from services.operations import figures
from services.operations.condition import awaited, last_resume
from services.operations.history import recorded
from services.operations.inspection.checkpoints import inspect_checkpoints
from services.operations.inspection.ledger import audit
from services.operations.observe import Member, fleet
from services.store import RunState
from services.store.evaluation import EvaluationState

LOGS_POLL_S = 0.2
STEPS_POLL_S = 0.5
BLOCK_BYTES = 1 << 16  # of the end of a file, read at a time
ADDED_BYTES = 1 << 20  # of new lines, read by one poll


def ls(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of run folders (run.dir).")] = Path("runs"),
    as_json: Json = False,
) -> int:
    """List the runs on this machine, the newest last.

    The list has their state, steps and reward.
    """
    found = list[dict[str, Any]]()
    for path in folder.glob("*/config.toml"):
        try:
            found.append(_listed(RunPaths(path.parent)))
        except (OSError, ConfigError) as error:
            say(f"{path.parent} cannot be read: {' '.join(str(error).split())}")
    found.sort(key=lambda run: run["changed_s"])
    if as_json:
        print_json({"runs": found})
        return EXIT_OK
    if not found:
        print(f"no runs in {folder}: start one with grpo run")
        return EXIT_OK
    rows = table("run", "state", "steps", "reward", "changed", "folder", right=("steps", "reward"))
    for run in found:
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["changed_s"]))
        reward = figures.number(run, "reward", ".3f")
        rows.add_row(cell(run["run"]), run["state"], f"{run['steps']}/{run['of']}", reward, changed, cell(run["folder"]))
    show(rows)
    return EXIT_OK


def _listed(folder: RunPaths) -> dict[str, Any]:
    """Return what is shown of a run: its condition, its steps, the reward of the last one, and when its folder last changed."""
    run, last = folder.settings.run, dict[str, Any]()
    for line in _tail(folder.metrics, 2)[0].splitlines() if folder.metrics.exists() else ():
        with contextlib.suppress(ValueError):  # the last line may be torn
            last = json.loads(line)
    changed_s = max(file.stat().st_mtime for file in (folder.config, folder.metrics, folder.summary) if file.exists())
    known = {"steps": int(last.get("step", -1)) + 1, "of": run.steps, "reward": last.get(figures.REWARD)}
    return {"run": run.name, "state": folder.condition_now().word, **known, "changed_s": changed_s, "folder": str(folder.path)}


async def status(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Show a run's state, last step and pods."""
    try:
        await _status(run, redis_url, as_json)
    except ConsoleError as error:
        _status_of_folder(folder_instead(run, redis_url, error), as_json)
    return EXIT_OK


async def _status(run: str, redis_url: str, as_json: bool) -> None:
    async with attach(run, redis_url) as attached:
        store, state = attached.store, await existing(attached)
        members = await fleet(store, attached.ttl_s)
        last = await last_step(attached, state)
        dead_letters, failed = await store.dead_letters.count(), await store.run.failed()
        evaluation, evaluated = await store.evaluation.state(attached.ttl_s), await store.evaluation.last_record()
    if not as_json:
        lines = [*_state_lines(attached, state, members, last, failed), *_evaluation_lines(evaluation, evaluated)]
        show(*lines, fleet_table(members, {}) if members else "no pods", *waiting_lines(members))
        return
    known: dict[str, Any] = {
        "run": attached.name,
        "condition": vars(attached.condition(state)),
        "state": vars(state),
        "pods": [{**msgspec.to_builtins(member.status), "age_s": round(member.age_s, 3)} for member in members],
        "last_step": last,
        "dead_letters": dead_letters,  # as many as are kept
        "failed": failed,
        "evaluation": {**msgspec.to_builtins(evaluation), "last": evaluated},
    }
    print_json(known)


def _status_of_folder(folder: RunPaths, as_json: bool) -> None:
    """Print the run's last condition."""
    run, found = folder.settings.run, folder.condition_now()
    last, evaluated = ([{}, *recorded(file)][-1] for file in (folder.metrics, folder.evaluations))
    if as_json:
        known = {"last_step": last, "evaluation": {"last": evaluated}, "note": NOTE}
        print_json({"run": run.name, "condition": vars(found), "state": None, "pods": [], **known})
        return
    lines = [f"{run.name}  {int(last.get('step', -1)) + 1}/{run.steps} steps  {found}"]
    lines += [figures.step_line(last, run.steps, None)] if last else []
    lines += [figures.evaluation_line(evaluated)] if evaluated else []
    show(*map(printable, lines), NOTE)


async def last_step(attached: Attached, state: RunState) -> dict[str, float]:
    """Return the record of the last step, which may be older than the newest one: a restore may have undone that."""
    last = await attached.store.monitor.last_record()
    if last.get("step", -1) <= state.committed_step:
        return last
    found = await attached.store.inspection.step_record(state.committed_step) or {}
    return {name: value for name, value in found.items() if value is not None}


def _state_lines(
    attached: Attached, state: RunState, members: Sequence[Member], last: Mapping[str, float], failed: int
) -> Iterator[Text]:
    found, config = attached.condition(state), attached.config
    yield Text.assemble(
        cell(f"{attached.name}  {state.committed_step + 1}/{state.steps} steps  ", "bold"),
        cell(found, f"bold {COLOURS[found.word]}"),
    )
    wanted = state.scale.desired(config.fleet.scaling if config else "request", config.generator.count if config else None)
    if attached.runs and (what := awaited(state, [member.status for member in members], wanted)):
        yield Text(f"waiting for {what}", "yellow")
    saved = "no checkpoint yet" if state.checkpointed_step < 0 else f"checkpoint of step {state.checkpointed_step}"
    versions = f"policy version {state.published_version} published, step {state.prepared_step} prepared"
    yield Text(f"{versions}, {state.slots_used}/{state.slots} slots used, {saved}")
    yield cell(_generators(state, members, wanted))
    if (resumed := last_resume(state)) and attached.runs and not state.ended:
        yield cell(resumed)
    if state.checkpoint_failed:
        yield cell(f"checkpoint not written: {state.checkpoint_failed}", "yellow")
    if state.restore_failed:
        step, _, why = state.restore_failed.partition(" ")
        yield cell(f"not restored to step {step}: {why}", "yellow")
    if failed:
        yield Text(figures.prompts_failed(failed), "yellow")
    if last:
        yield Text(figures.step_line(last, state.steps, None))


def _generators(state: RunState, members: Sequence[Member], wanted: int | None) -> str:
    """Return a line with the numbers of running, draining and desired generators."""
    pods = [member.status for member in members if member.status.kind == "generator"]
    draining = sum(pod.phase == "draining" for pod in pods)
    why = f" ({state.scale.why})" if state.scale.why else ""
    desired = "" if wanted is None else f", {wanted} desired{why}"
    return f"generators: {len(pods) - draining} running{f', {draining} draining' if draining else ''}{desired}"


def _evaluation_lines(evaluation: EvaluationState, last: Mapping[str, float]) -> Iterator[Text]:
    if found := evaluation.round:
        fault = f"; cannot be completed: {found.fault}" if found.fault else ""
        yield cell(
            f"evaluating version {found.version}: {found.done}/{found.total} prompts, {found.volunteers} generators{fault}"
        )
    if last:
        yield cell(figures.evaluation_line(last))
    if evaluation.abandoned:
        yield cell(f"last evaluation abandoned: {evaluation.abandoned}")


def logs(
    run: Run = "",
    service: Annotated[str, typer.Argument(metavar="SERVICE", help="A pod or a kind of service; default: all.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each log to print first.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")] = False,
    as_json: Json = False,
) -> int:
    """Print the logs of a run's services."""
    folder = existing_folder(run)
    files = _files(folder, service)
    width = -1 if as_json else max(len(file.stem) for file in files)
    ends: dict[Path, int] = {}
    for file in files:
        text, ends[file] = _tail(file, lines)
        _say(file, text, width, len(files) > 1)
    while follow:
        time.sleep(LOGS_POLL_S)
        for file in _files(folder, service):
            text, ends[file] = _added(file, ends.get(file, 0))
            _say(file, text, width, len(files) > 1)
    return EXIT_OK


def _files(folder: RunPaths, service: str) -> list[Path]:
    """Return the logs of the services whose name begins with `service`. Raise `ConsoleError` if there are none."""
    files = sorted(folder.logs.glob("*.log"))
    chosen = [file for file in files if file.stem.startswith(service)]
    if not chosen:
        names = ", ".join(file.stem for file in files) or "none yet"
        raise ConsoleError(f"no log of {service or 'any service'!r} in {folder.logs}: choose from {names}", EXIT_CONFIG)
    return chosen


def _tail(file: Path, lines: int) -> tuple[bytes, int]:
    """Return the last lines of a file, and where it ends."""
    with file.open("rb") as body:
        end = position = os.fstat(body.fileno()).st_size
        text = b""
        while position and text.count(b"\n") <= lines:
            size = min(BLOCK_BYTES, position)
            position -= size
            body.seek(position)
            text = body.read(size) + text
    return b"".join(text.splitlines(keepends=True)[-lines:] if lines else []), end


def _added(file: Path, start: int) -> tuple[bytes, int]:
    """Return the whole lines after `start`, and where they end. A file that became shorter is read from its beginning."""
    with file.open("rb") as body:
        body.seek(start if os.fstat(body.fileno()).st_size >= start else 0)
        begun = body.tell()
        text = body.read(ADDED_BYTES)
    whole = text.rfind(b"\n") + 1
    if not whole and len(text) == ADDED_BYTES:  # a longer line comes in pieces
        whole = len(text)
    return text[:whole], begun + whole


def _say(file: Path, text: bytes, width: int, named: bool) -> None:
    for line in map(printable, text.decode("utf-8", "replace").splitlines()):
        if width < 0:
            print(safe_json(json.dumps({"service": file.stem, "line": line}, ensure_ascii=False)), flush=True)
        else:
            print(f"{file.stem:<{width}}  {line}" if named else line, flush=True)


async def smoke(
    run: Run = "",
    redis_url: RedisUrl = "",
    steps: Annotated[int, typer.Option(min=1, help="Number of further steps to wait for.")] = 3,
    limit_s: Annotated[
        float,
        typer.Option(
            "--wait",
            "--limit-s",
            metavar="[SECONDS]",
            min=0,
            show_default=False,
            help="Wait for them, at most this long; default: 600.",
        ),
    ] = SMOKE_WAIT_S,
    as_json: Json = False,
) -> int:
    """Verify that a run makes progress.

    The run must train a few more steps, or finish, without losing a ticket. This command only reads. Exit code 1: the run made
    too little progress in time; the message says why.
    """
    async with attach(run, redis_url) as attached:
        ended = await _watch(attached, steps, time.monotonic() + limit_s)
        found = await audit(attached.store)
    if not found.ok:
        raise ConsoleError(f"run {attached.name}: the audit found a problem: see grpo audit", EXIT_FAILED)
    progress = f"finished ({ended})" if ended else f"trained {steps} more steps"
    if as_json:
        print_json({"run": attached.name, "finished": ended, "steps": None if ended else steps, **found.as_dict()})
    else:
        print(f"run {attached.name}: {progress}, no ticket lost or duplicated")
    return EXIT_OK


async def _watch(attached: Attached, steps: int, deadline: float) -> str:
    """Wait for `steps` more steps, or the end.

    Return how the run ended; empty: it trained the steps. Steps that a restore undoes count as trained.
    """
    last: int | None = None
    trained = 0
    while True:
        state = await attached.store.run.state()
        if state is not None:
            trained += max(0, state.committed_step - last) if last is not None else 0
            last = state.committed_step
            if state.finished or trained >= steps:
                return printable(state.finished)
        if not attached.live:
            raise ConsoleError(f"run {attached.name} is stopped: start it with grpo run", EXIT_FAILED)
        if time.monotonic() > deadline:
            raise ConsoleError(f"run {attached.name}: trained {trained} of {steps} steps; {await _why(attached)}", EXIT_FAILED)
        await asyncio.sleep(STEPS_POLL_S)


async def _why(attached: Attached) -> str:
    """Explain why a run makes no progress."""
    state = await attached.store.run.state()
    if state is None:
        return "it does not exist yet: see the log of dataprep"
    if state.paused:
        return "paused: " + ", ".join(f"{role} ({printable(why)})" for role, why in sorted(state.paused.items()))
    pods = await fleet(attached.store, attached.ttl_s)
    return "pods: " + (", ".join(sorted(f"{pod.status.name} {pod.status.phase}" for pod in pods)) or "none")


def checkpoints(
    run: Run = "",
    as_json: Json = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and verify its checksum.")] = False,
) -> int:
    """List the checkpoints of a run, from its folder.

    Exit code 1: a checkpoint cannot be loaded. --verify also finds damaged files.
    """
    folder = existing_folder(run)
    steps, given = folder.settings.run.steps, folder.settings.checkpoint
    found = inspect_checkpoints(folder.checkpoints, steps, given.every_steps, given.keep, verify)
    if as_json:
        print_json(found)
    elif found.checkpoints:
        show(answer(found))
    else:
        print(f"no checkpoints in {printable(found.folder)}; the trainer writes one every {given.every_steps} steps")
    return EXIT_FAILED if any(one.complete and one.problem for one in found.checkpoints) else EXIT_OK
